//! Opens the CUDA libraries once, and keeps them open. The bindings panic at a call into a missing library, and find
//! those that are open already.

use std::sync::OnceLock;

use cudarc::get_lib_name_candidates;
use libloading::Library;

use super::{DriverFailure, Fallible};

/// A library, and advice for users who lack it.
struct CudaLibrary {
    name: &'static str,
    advice: &'static str,
    opened: OnceLock<Fallible<&'static Library>>,
}

static DRIVER: CudaLibrary =
    CudaLibrary::new("cuda", "install NVIDIA's driver (version 525 or newer; 580 for CUDA 13's libraries)");
static COMPILER: CudaLibrary = CudaLibrary::new(
    "nvrtc",
    "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` and put its folder `lib` on LD_LIBRARY_PATH",
);
static GEMM: CudaLibrary = CudaLibrary::new(
    "cublasLt",
    "install the CUDA toolkit, or `pip install nvidia-cublas` and put its folder `lib` on LD_LIBRARY_PATH",
);

impl CudaLibrary {
    const fn new(name: &'static str, advice: &'static str) -> Self {
        CudaLibrary { name, advice, opened: OnceLock::new() }
    }

    fn open(&self) -> Fallible<&'static Library> {
        self.opened.get_or_init(|| self.first_that_opens(&get_lib_name_candidates(self.name))).clone()
    }

    /// Opens the first of `names` that loads; these are the bindings' own names. It stays open for good: mapping it
    /// again would take as long as the first time.
    fn first_that_opens(&self, names: &[String]) -> Fallible<&'static Library> {
        let mut refused = Vec::new();
        for name in names {
            // SAFETY: the constructors of NVIDIA's libraries rely on nothing of this program.
            match unsafe { Library::new(name) } {
                Ok(library) => return Ok(Box::leak(Box::new(library))),
                Err(error) => refused.extend(found_but_refused(&error)),
            }
        }
        Err(DriverFailure::new(self.missing(names, &refused)))
    }

    fn missing(&self, names: &[String], refused: &[String]) -> String {
        let CudaLibrary { name, advice, .. } = self;
        match refused {
            [] => format!("lib{name} was not found; {advice} (tried {})", names.join(", ")),
            _ => format!("lib{name} was found, and the system cannot load it: {}; {advice}", refused.join("; ")),
        }
    }
}

/// The loader's message about a library that exists and cannot be loaded: a dependency is missing, or the architecture
/// differs.
fn found_but_refused(error: &libloading::Error) -> Option<String> {
    let words = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    // The loader names just the library itself if it does not exist.
    let absent = words.split_once(": cannot open shared object file").is_some_and(|(name, _)| !name.contains('/'));
    (!absent).then_some(words)
}

/// Opens the libraries that every use of a device needs; the error names the first that is missing.
pub(super) fn device() -> Fallible<()> {
    DRIVER.open()?;
    GEMM.open().map(drop)
}

/// A function of the driver that the bindings know by a newer name alone.
///
/// # Safety
/// `F` is the function's type in the driver's header.
pub(super) unsafe fn of_driver<F: Copy>(name: &str) -> Fallible<F> {
    // SAFETY: the caller's promise.
    let found = unsafe { DRIVER.open()?.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|e| DriverFailure::new(format!("libcuda has no `{name}`: {e}")))
}

/// Opens NVRTC.
pub(super) fn compiler() -> Fallible<()> {
    COMPILER.open().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_there_and_cannot_be_loaded_is_told_apart() {
        let library = CudaLibrary::new("no-such-library", "install it");
        let error = library.first_that_opens(&["libno-such-library.so.13".into()]).unwrap_err().to_string();
        assert!(
            error.contains("libno-such-library was not found; install it (tried libno-such-library.so.13)"),
            "{error}"
        );
        let path = std::env::temp_dir().join(format!("libbroken-{}.so", std::process::id()));
        std::fs::write(&path, "no library").unwrap();
        let error = library.first_that_opens(&[path.display().to_string()]).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.contains("cannot load it") && error.contains("libbroken"), "{error}");
    }
}
