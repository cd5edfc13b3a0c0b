//! Finding CUDA's libraries: the dynamic linker reads its path once, so the program restarts itself with a longer one.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Set in the second start.
const STARTED: &str = "WEFTGRAD_GPU_CHECK_STARTED";
const GOLDENS: &str = "WEFTGRAD_GOLDENS";
pub(crate) const PATH: &str = "LD_LIBRARY_PATH";
/// The path of the first start, which other programs keep.
pub(crate) const GIVEN: &str = "WEFTGRAD_GPU_CHECK_GIVEN_PATH";
/// A folder is useful if it contains one of these.
const NAMES: [&str; 4] = ["libnvrtc.so", "libcublasLt.so", "libnccl.so", "libcuda.so.1"];
/// Where the toolkit and, in containers, the driver usually are.
const USUAL: [&str; 3] = ["/usr/local/cuda/lib64", "/opt/cuda/lib64", "/usr/local/nvidia/lib64"];

/// Runs this program with the libraries and PyTorch's values where it looks for them; `None` when it already does, else
/// how that ended.
pub(crate) fn in_surroundings(goldens: impl FnOnce() -> Result<PathBuf, String>) -> Result<Option<u8>, String> {
    if env::var_os(STARTED).is_some() {
        return Ok(None);
    }
    let given: Vec<PathBuf> = env::var_os(PATH).map(|p| env::split_paths(&p).collect()).unwrap_or_default();
    let path = env::join_paths(given.into_iter().chain(folders())).map_err(|e| e.to_string())?;
    let program = env::current_exe().map_err(|e| e.to_string())?;
    let mut again = Command::new(program);
    again
        .args(env::args_os().skip(1))
        .env(STARTED, "1")
        .env(GIVEN, env::var_os(PATH).unwrap_or_default())
        .env(PATH, path)
        .env(GOLDENS, goldens()?);
    let status = again.status().map_err(|e| e.to_string())?;
    let code = status.code().and_then(|c| u8::try_from(c).ok());
    code.map(Some).ok_or_else(|| format!("ended with {status}"))
}

/// Folders that hold one of the libraries: of Python's packages, then the usual ones.
fn folders() -> Vec<PathBuf> {
    let packages = python_folders().into_iter().flat_map(|site| children(&site.join("nvidia")));
    let libraries = packages.map(|package| package.join("lib"));
    let all = libraries.chain(USUAL.iter().map(PathBuf::from));
    all.filter(|folder| holds_a_library(folder)).collect()
}

/// Where Python keeps packages; none without Python.
fn python_folders() -> Vec<PathBuf> {
    let code = "import site, sys; print('\\n'.join(sys.path + site.getsitepackages() + [site.getusersitepackages()]))";
    let output = Command::new("python3").args(["-c", code]).output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let mut folders: Vec<PathBuf> = Vec::new();
    for line in text.lines().filter(|l| !l.is_empty()) {
        if !folders.iter().any(|f| f == Path::new(line)) {
            folders.push(line.into());
        }
    }
    folders
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> = entries.map(|e| e.path()).collect();
    all.sort();
    all
}

fn holds_a_library(folder: &Path) -> bool {
    let is_one = |path: &PathBuf| {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        NAMES.iter().any(|library| name.starts_with(library))
    };
    children(folder).iter().any(is_one)
}
