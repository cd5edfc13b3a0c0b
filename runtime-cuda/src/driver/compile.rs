//! Compiles CUDA C to machine code of one architecture, or to PTX, by NVRTC, and caches it on disk.
//!
//! Options are chosen so that results agree with the host to the last few bits: no fast math, IEEE division and square
//! root, gradual underflow. `--fmad` follows [`KernelSource::contracts`]. It is on for hand-written kernels, where it
//! saves a norm a third of its instructions, and off for generated ones and those that call a program of scores.

use std::{
    ffi::{CStr, CString},
    fmt, fs,
    hash::Hasher,
    path::{Path, PathBuf},
    process,
    sync::OnceLock,
};

use cudarc::nvrtc::{result, sys};
use numcore::Fnv1a;

use super::{DriverFailure, Fallible, KernelSource, libraries};

/// A compute capability: 90 is 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Architecture(
    /// Ten times the version.
    pub u32,
);

impl fmt::Display for Architecture {
    /// The compiler's name of the architecture. That of 9.0 has the instructions that no later one has.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.0, if self.0 == 90 { "a" } else { "" })
    }
}

/// The form of compiled code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CodeForm {
    /// Machine code (CUBIN).
    Machine,
    /// PTX, with the lines of the source.
    Ptx,
}

/// The first bytes of every cached file, before a hash of the code that follows.
const MAGIC: &[u8; 8] = b"weftgr01";

/// Compiles kernels, or reads machine code that was compiled before. NVRTC is opened at the first compilation.
#[derive(Debug)]
pub struct Compiler {
    architecture: Architecture,
    /// The major version of CUDA that the driver supports; `None` without a driver.
    driver: Option<i32>,
    folder: Option<PathBuf>,
    opened: OnceLock<Fallible<()>>,
}

impl Compiler {
    /// Creates a compiler for an architecture and a driver, which keeps machine code in `folder`. NVRTC is found by the
    /// system's loader.
    pub fn new(architecture: Architecture, driver: Option<i32>, folder: Option<PathBuf>) -> Compiler {
        Compiler { architecture, driver, folder, opened: OnceLock::new() }
    }

    /// Opens NVRTC. An NVRTC newer than the driver is refused: the driver would refuse its code without a reason.
    fn open(&self) -> Fallible<()> {
        let open = || {
            libraries::compiler()?;
            let (mut major, mut minor) = (0, 0);
            // SAFETY: the library is loaded; both pointers are valid.
            unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
                .result()
                .map_err(|e| DriverFailure::new(format!("NVRTC: {e}")))?;
            fits((major, minor), self.driver)
        };
        self.opened.get_or_init(open).clone()
    }

    /// The folder of compiled machine code in the user's cache folder; `None` without a home folder.
    pub fn cache_folder() -> Option<PathBuf> {
        let given = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let cache = given("XDG_CACHE_HOME").or_else(|| given("HOME").map(|home| home.join(".cache")));
        cache.map(|c| c.join("weftgrad").join("cuda"))
    }

    /// Compiles a source to machine code (CUBIN), or reads it from the folder.
    pub fn compile(&self, source: &KernelSource) -> Fallible<Vec<u8>> {
        self.cached(source, CodeForm::Machine)
    }

    /// Compiles a source to PTX, or reads it from the folder.
    pub fn ptx(&self, source: &KernelSource) -> Fallible<String> {
        let text = self.cached(source, CodeForm::Ptx)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn cached(&self, source: &KernelSource, form: CodeForm) -> Fallible<Vec<u8>> {
        let file = self.folder.as_ref().map(|folder| folder.join(self.file_name(source, form)));
        if let Some(code) = file.as_deref().and_then(read) {
            return Ok(code);
        }
        let code = self.translate(source, form)?;
        if let Some(file) = &file {
            // A cache that cannot be written is only slower.
            let _ = write(file, &code);
        }
        Ok(code)
    }

    /// The file name of a kernel. Two kernels share a name only if source, options, architecture and the driver's
    /// version of CUDA are equal. The compiler's version is not part of it, so cached code needs no compiler.
    fn file_name(&self, source: &KernelSource, form: CodeForm) -> String {
        let text = [source.text.as_str(), &self.options(source, form).join(" ")].join("\0");
        let (a, b) = (hash(text.as_bytes(), 0), hash(text.as_bytes(), 1));
        let kind = if form == CodeForm::Machine { "cubin" } else { "ptx" };
        format!("{a:016x}{b:016x}-sm{}-cuda{}.{kind}", self.architecture.0, self.driver.unwrap_or(0))
    }

    fn options(&self, source: &KernelSource, form: CodeForm) -> Vec<String> {
        let (target, lines) = match form {
            CodeForm::Machine => ("sm", None),
            CodeForm::Ptx => ("compute", Some("--generate-line-info".into())),
        };
        let options = [
            format!("--gpu-architecture={target}_{}", self.architecture),
            "--std=c++17".into(),
            format!("--fmad={}", source.contracts),
            "--ftz=false".into(),
            "--prec-div=true".into(),
            "--prec-sqrt=true".into(),
        ];
        options.into_iter().chain(lines).collect()
    }

    fn translate(&self, source: &KernelSource, form: CodeForm) -> Fallible<Vec<u8>> {
        self.open()?;
        let named = |what: &str| DriverFailure::new(format!("kernel {}: {what}", source.entry));
        let text = CString::new(source.text.as_str()).map_err(|_| named("its text holds a zero byte"))?;
        let name = CString::new(source.entry.as_str()).map_err(|_| named("its name holds a zero byte"))?;
        let program = NvrtcProgram::new(&text, &name).map_err(|e| named(&e.to_string()))?;
        // SAFETY: the program was created and lives.
        let compiled = unsafe { result::compile_program(program.0, &self.options(source, form)) };
        compiled.map_err(|e| named(&format!("{e}\n{}", program.log())))?;
        program.code(form).map_err(|e| named(&e.to_string()))
    }
}

/// Returns an error if this NVRTC is newer than the driver. Only the major version counts, as machine code is loaded.
fn fits((major, minor): (i32, i32), driver: Option<i32>) -> Fallible<()> {
    match driver {
        Some(driver) if major > driver => Err(DriverFailure::new(format!(
            "NVRTC {major}.{minor} makes code for drivers of CUDA {major}, and this driver is for CUDA {driver}: update the driver, or install NVRTC {driver} \
             (`pip install nvidia-cuda-nvrtc-cu{driver}`) and put it first on LD_LIBRARY_PATH"
        ))),
        _ => Ok(()),
    }
}

/// An NVRTC program, destroyed on drop. It may refer to its source, which outlives it in [`Compiler::translate`].
struct NvrtcProgram(sys::nvrtcProgram);

impl NvrtcProgram {
    fn new(text: &CStr, name: &CStr) -> Result<NvrtcProgram, result::NvrtcError> {
        result::create_program(text, Some(name)).map(NvrtcProgram)
    }

    fn log(&self) -> String {
        // SAFETY: the program lives.
        let log = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn code(&self, form: CodeForm) -> Result<Vec<u8>, result::NvrtcError> {
        if form == CodeForm::Ptx {
            // SAFETY: the program lives.
            let text = unsafe { result::get_ptx(self.0) }?;
            return Ok(text.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect());
        }
        let mut size = 0usize;
        // SAFETY: the program is alive; the pointer is valid.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) }.result()?;
        let mut code = vec![0u8; size];
        // SAFETY: the program lives; it writes exactly `size` bytes.
        unsafe { sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast()) }.result()?;
        Ok(code)
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: it was created, and nothing destroys it before.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Reads the machine code in a file, if the file is complete: magic, a hash of the rest, machine code.
fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (head, code) = bytes.split_at_checked(16)?;
    let expected = u64::from_le_bytes(head[8..].try_into().ok()?);
    (&head[..8] == MAGIC && expected == hash(code, 0)).then(|| code.to_vec())
}

/// Writes machine code to a temporary file in the folder and renames it, so that no reader sees a part of it.
fn write(file: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let thread = format!("{:?}", std::thread::current().id());
    let unique = hash(thread.as_bytes(), u64::from(process::id()));
    let beside = file.with_extension(format!("{unique:016x}.part"));
    fs::write(&beside, [MAGIC.as_slice(), &hash(code, 0).to_le_bytes(), code].concat())?;
    fs::rename(&beside, file)
}

/// A hash that is equal in every process.
pub(super) fn hash(bytes: &[u8], seed: u64) -> u64 {
    let mut hash = Fnv1a::seeded(seed);
    hash.write(bytes);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_file_is_read_back_and_a_damaged_one_is_not() {
        let folder = std::env::temp_dir().join(format!("weftgrad-cuda-cache-{}", process::id()));
        let file = folder.join("kernel.cubin");
        write(&file, b"machine code").unwrap();
        assert_eq!(read(&file).as_deref(), Some(b"machine code".as_slice()));
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, &bytes).unwrap();
        assert_eq!(read(&file), None);
        fs::write(&file, b"short").unwrap();
        assert_eq!(read(&file), None);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn names_tell_texts_architectures_and_drivers_apart() {
        let source = |text: &str| KernelSource { text: text.into(), entry: "k".into(), contracts: true };
        let compiler = |arch, driver| Compiler::new(Architecture(arch), Some(driver), None);
        let names = [
            compiler(80, 13).file_name(&source("a"), CodeForm::Machine),
            compiler(80, 13).file_name(&source("b"), CodeForm::Machine),
            compiler(90, 13).file_name(&source("a"), CodeForm::Machine),
            compiler(80, 12).file_name(&source("a"), CodeForm::Machine),
            compiler(80, 13).file_name(&source("a"), CodeForm::Ptx),
        ];
        assert!(names.iter().enumerate().all(|(i, a)| names[i + 1..].iter().all(|b| a != b)));
    }

    #[test]
    fn what_is_kept_needs_no_compiler() {
        let folder = std::env::temp_dir().join(format!("weftgrad-cuda-kept-{}", process::id()));
        let source = KernelSource { text: "no CUDA C".into(), entry: "k".into(), contracts: true };
        let compiler = Compiler::new(Architecture(90), Some(13), Some(folder.clone()));
        write(&folder.join(compiler.file_name(&source, CodeForm::Machine)), b"machine code").unwrap();
        assert_eq!(compiler.compile(&source).unwrap(), b"machine code");
        assert!(compiler.opened.get().is_none());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_compiler_newer_than_the_driver_is_told() {
        let told = fits((13, 2), Some(12)).unwrap_err().to_string();
        assert!(told.contains("NVRTC 13.2") && told.contains("driver is for CUDA 12"), "{told}");
        for (version, driver) in [((13, 2), Some(13)), ((12, 8), Some(13)), ((13, 0), None)] {
            assert!(fits(version, driver).is_ok());
        }
    }
}
