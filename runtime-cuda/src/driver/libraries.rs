//! Whether the CUDA libraries can be loaded: checked first, because calling into a missing one panics.

use cudarc::{cublaslt, driver, nvrtc};

use super::{DriverFailure, Fallible};

/// A library, how its presence is checked, and what to do when it is missing.
struct Library {
    name: &'static str,
    present: fn() -> bool,
    advice: &'static str,
}

const DRIVER: Library = Library {
    name: "libcuda",
    // SAFETY: it only tries to open the library.
    present: || unsafe { driver::sys::is_culib_present() },
    advice: "install NVIDIA's driver (version 525 or newer)",
};

const OTHERS: [Library; 2] = [
    Library {
        name: "libnvrtc",
        // SAFETY: as above.
        present: || unsafe { nvrtc::sys::is_culib_present() },
        advice: "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` and put its folder `lib` on LD_LIBRARY_PATH",
    },
    Library {
        name: "libcublasLt",
        // SAFETY: as above.
        present: || unsafe { cublaslt::sys::is_culib_present() },
        advice: "install the CUDA toolkit, or `pip install nvidia-cublas` and put its folder `lib` on LD_LIBRARY_PATH",
    },
];

fn found(library: &Library) -> Fallible<()> {
    match (library.present)() {
        true => Ok(()),
        false => Err(DriverFailure::new(format!("{} was not found; {}", library.name, library.advice))),
    }
}

/// Checks all libraries that a device needs, and names the first that is missing.
pub(super) fn all() -> Fallible<()> {
    found(&DRIVER)?;
    OTHERS.iter().try_for_each(found)
}

/// Checks the compiler alone.
pub(super) fn compiler() -> Fallible<()> {
    found(&OTHERS[0])
}
