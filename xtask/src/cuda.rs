//! The stages `ptx` and `cuda`: CUDA's kernels without a GPU, by NVIDIA's compiler and an interpreter of its PTX.

use std::fs;
use std::path::{Path, PathBuf};

use crate::repo;
use crate::stages::{WITHOUT_MPI, run_cargo, tests_args};

/// Where NVRTC is kept, from its Python package. Compilers newer than the driver of a machine make code it refuses, so
/// the version is fixed: that of CUDA 13.0.
pub(crate) const COMPILER: &str = "target/nvrtc-13.0.88";
pub(crate) const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
const LIBRARY: &str = "libnvrtc.so.13";

/// The integration tests, each a file. They are selected by name among those of all packages: with fewer packages,
/// dependencies have other features than in the stage `test`, and are compiled a second time.
const FOLDER: &str = "runtime-cuda/tests";
/// Tests that compile hundreds of kernels, or launch large ones: minutes.
const LONG: &[&str] = &["cuts", "emulated", "order"];

/// Kernels, as PTX on the host.
pub(crate) fn run_ptx() -> Result<(), String> {
    tests("weftgrad-runtime-cuda/emulate", |test| !LONG.contains(&test))
}

/// Kernels as machine code of every architecture, and all tests of them as PTX on the host.
pub(crate) fn run() -> Result<(), String> {
    let features = "weftgrad-runtime-cuda/emulate,weftgrad-runtime-cuda/nvrtc-tests";
    compiling(features, &["--lib"], &["--", "codegen::tests"])?;
    tests(features, |_| true)
}

fn tests(features: &str, are: impl Fn(&str) -> bool) -> Result<(), String> {
    let tests = sources(&repo::root().join(FOLDER))?;
    let named: Vec<&str> = tests.iter().filter(|name| are(name)).flat_map(|name| ["--test", name.as_str()]).collect();
    compiling(features, &named, &[])
}

/// Runs tests of these targets with the compiler of kernels.
fn compiling(features: &str, targets: &[&str], filter: &[&str]) -> Result<(), String> {
    let args = [&tests_args(targets)[..], &WITHOUT_MPI, &["--features", features], filter].concat();
    run_cargo(&args, &[("LD_LIBRARY_PATH", &libraries()?)])
}

/// The search path of libraries, with NVRTC.
pub(crate) fn libraries() -> Result<String, String> {
    let none = format!("{COMPILER} holds no {LIBRARY}; `cargo xtask test --install ptx` installs it");
    let folder = holding(&repo::root().join(COMPILER), LIBRARY).ok_or(none)?;
    Ok(std::env::var("LD_LIBRARY_PATH").map_or(folder.clone(), |rest| format!("{folder}:{rest}")))
}

/// The names of the sources in a folder, in order.
fn sources(folder: &Path) -> Result<Vec<String>, String> {
    let unreadable = |error| format!("{}: {error}", folder.display());
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(unreadable)?;
    let files =
        entries.into_iter().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|x| x == "rs"));
    let mut names: Vec<String> = files.filter_map(|path| path.file_stem()?.to_str().map(str::to_string)).collect();
    names.sort();
    Ok(names)
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
    fn all_tests_of_the_crate_are_found() {
        assert_eq!(
            sources(&repo::root().join(FOLDER)).expect("a folder"),
            [
                "captures",
                "cuts",
                "emulated",
                "failures",
                "faults",
                "kernel_times",
                "linear",
                "live_memory",
                "memory",
                "nccl",
                "no_gpu",
                "norms",
                "order",
                "recomputation",
                "scores",
                "tuned",
                "written"
            ]
        );
        assert!(LONG.iter().all(|test| repo::root().join(FOLDER).join(format!("{test}.rs")).is_file()));
        assert!(sources(&repo::root().join("xtask/no-such-folder")).is_err());
    }

    #[test]
    fn no_other_package_has_a_test_of_such_a_name() {
        let own = sources(&repo::root().join(FOLDER)).expect("a folder");
        let others =
            fs::read_dir(repo::root()).expect("a folder").flatten().map(|package| package.path().join("tests"));
        for folder in others.filter(|folder| folder.is_dir() && *folder != repo::root().join(FOLDER)) {
            let shared: Vec<String> =
                sources(&folder).expect("a folder").into_iter().filter(|name| own.contains(name)).collect();
            assert!(shared.is_empty(), "{}: {shared:?}", folder.display());
        }
    }

    #[test]
    fn a_file_is_found_below() {
        let root = repo::root().join("xtask");
        assert_eq!(holding(&root, "main.rs"), root.join("src").to_str().map(str::to_string));
        assert_eq!(holding(&root, "no-such-file"), None);
    }
}
