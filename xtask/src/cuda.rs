//! The stage `cuda`: NVIDIA's compiler from its Python package, kept under `target/`, then the tests that need it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::repo;
use crate::stages::run_cargo;

/// Compilers newer than the driver of a machine make code it refuses, so the version is fixed: that of CUDA 13.0.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
const LIBRARY: &str = "libnvrtc.so.13";

/// Machine code for every architecture, by NVIDIA's compiler; the kernels' own checks; then the suite on the emulator.
pub fn run() -> Result<(), String> {
    let folder = compiler()?;
    let path = std::env::var("LD_LIBRARY_PATH").map_or(folder.clone(), |rest| format!("{folder}:{rest}"));
    let package = ["test", "-p", "weftgrad-runtime-cuda"];
    run_cargo(&[&package[..], &["--features", "nvrtc-tests", "--lib"]].concat(), &[("LD_LIBRARY_PATH", &path)])?;
    kernels()?;
    run_cargo(&[&package[..], &["--features", "emulate", "--test", "emulated"]].concat(), &[])
}

/// Every written kernel on the emulator, against formulas.
fn kernels() -> Result<(), String> {
    let script = repo::root().join("runtime-cuda/kernels/shim/check.sh");
    let status = Command::new("sh").arg(&script).status().map_err(|e| format!("{}: {e}", script.display()))?;
    if status.success() { Ok(()) } else { Err(format!("{} failed: {status}", script.display())) }
}

/// The folder with NVRTC, which is downloaded if it is not there.
fn compiler() -> Result<String, String> {
    let at = repo::root().join("target/nvrtc-13.0.88");
    if let Some(folder) = holding(&at, LIBRARY) {
        return Ok(folder);
    }
    println!("fetching {PACKAGE}");
    let done = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
        .arg(&at)
        .arg(PACKAGE)
        .status();
    let advice = format!("install python3 with pip, and see that `pip install {PACKAGE}` can reach a package index");
    match done {
        Ok(status) if status.success() => holding(&at, LIBRARY).ok_or(format!("{PACKAGE} holds no {LIBRARY}")),
        Ok(status) => Err(format!("`pip install {PACKAGE}` failed ({status}); {advice}")),
        Err(error) => Err(format!("python3 could not be started ({error}); {advice}")),
    }
}

/// The folder below `root` that holds a file of this name.
fn holding(root: &Path, name: &str) -> Option<String> {
    let mut folders: Vec<PathBuf> = vec![root.into()];
    while let Some(folder) = folders.pop() {
        if folder.join(name).is_file() {
            return folder.to_str().map(str::to_string);
        }
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        folders.extend(entries.map(|e| e.path()).filter(|p| p.is_dir()));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_below() {
        let root = repo::root().join("xtask");
        assert_eq!(holding(&root, "main.rs"), root.join("src").to_str().map(str::to_string));
        assert_eq!(holding(&root, "no-such-file"), None);
    }
}
