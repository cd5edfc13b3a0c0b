//! `cargo xtask gpu`: packs the folder `.gpu`, which a machine with a GPU needs beside NVIDIA's driver and libraries.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::stages::run_cargo;
use crate::{cuda, repo};

const FOLDER: &str = ".gpu";
/// The content of the archive: the program, and its compiled kernels, which later calls find here.
const ARCHIVED: &str = "target/gpu-check";
const ARCHIVE: &str = "gpu-check.tar.xz";
const PROGRAM: &str = "gpu-check";
/// The capability of the GPU and the driver's version of CUDA, for which kernels are compiled.
const TARGET: &str = "90,13";
/// What the machine's scripts and PyTorch's times come from.
const SOURCES: &str = "gpu-check";
/// The loader of Vulkan drivers, for WebGPU: GPU machines may lack it.
const LOADER: &str = "/usr/lib/x86_64-linux-gnu/libvulkan.so.1";
/// The most bytes that the folder may have, with all files that git tracks, to be copied to a machine.
const MOST_BYTES: u64 = 64 << 20;

pub(crate) fn pack() -> Result<(), String> {
    let root = repo::root();
    let (folder, archived) = (root.join(FOLDER), root.join(ARCHIVED));
    run_cargo(&["build", "--release", "-p", "weftgrad-gpu-check", "--features", "emulate,wgpu"], &[])?;
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|e| at(&folder, e))?;
    }
    fs::create_dir_all(folder.join("lib")).map_err(|e| at(&folder, e))?;
    fs::create_dir_all(&archived).map_err(|e| at(&archived, e))?;
    let program = archived.join(PROGRAM);
    run(Command::new("strip").arg("-o").arg(&program).arg(root.join("target/release/weftgrad-gpu-check")))?;
    let mut compile = Command::new(&program);
    compile.args(["--precompile", TARGET]).env("XDG_CACHE_HOME", &archived).env("LD_LIBRARY_PATH", cuda::libraries()?);
    run(&mut compile)?;
    run(Command::new("tar").arg("-C").arg(&archived).arg("-cJf").arg(folder.join(ARCHIVE)).arg("."))?;
    for file in scripts(&root.join(SOURCES))? {
        copy(&file, &folder)?;
    }
    if Path::new(LOADER).is_file() {
        copy(Path::new(LOADER), &folder.join("lib"))?;
    }
    let (packed, tracked) = (bytes_below(&folder)?, tracked_bytes(&root)?);
    println!("{FOLDER}: {:.1} MB, beside {:.1} MB that git tracks", packed as f64 / 1e6, tracked as f64 / 1e6);
    if packed + tracked < MOST_BYTES {
        return Ok(());
    }
    let why = format!("{ARCHIVED} keeps kernels of earlier texts too: remove it, and pack again");
    Err(format!("{FOLDER} and what git tracks have {} bytes, and may have {MOST_BYTES}; {why}", packed + tracked))
}

/// The calls of a machine, and the script that times PyTorch.
fn scripts(from: &Path) -> Result<Vec<PathBuf>, String> {
    let calls = from.join("calls");
    let entries = fs::read_dir(&calls).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(|e| at(&calls, e))?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    files.sort();
    files.push(from.join("torch_times.py"));
    Ok(files)
}

fn copy(file: &Path, folder: &Path) -> Result<(), String> {
    let name = file.file_name().unwrap_or_default();
    fs::copy(file, folder.join(name)).map(drop).map_err(|e| at(file, e))
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().display().to_string();
    let status = command.status().map_err(|e| format!("{program}: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("{program} ended with {status}")) }
}

fn bytes_below(folder: &Path) -> Result<u64, String> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(|e| at(folder, e))?;
    let bytes = |path: PathBuf| if path.is_dir() { bytes_below(&path) } else { length(&path) };
    entries.into_iter().map(|entry| bytes(entry.path())).sum()
}

fn tracked_bytes(root: &Path) -> Result<u64, String> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output();
    let listed = listed.map_err(|e| format!("git: {e}"))?.stdout;
    let names = listed.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    // A file that was removed and not yet committed has no bytes.
    Ok(names.filter_map(|name| length(&root.join(String::from_utf8_lossy(name).as_ref())).ok()).sum())
}

fn length(path: &Path) -> Result<u64, String> {
    fs::metadata(path).map(|metadata| metadata.len()).map_err(|e| at(path, e))
}

fn at(path: &Path, e: std::io::Error) -> String {
    format!("{}: {e}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_gets_every_call() {
        let files = scripts(&repo::root().join(SOURCES)).expect("scripts");
        let names: Vec<_> = files.iter().filter_map(|file| file.file_name()?.to_str()).collect();
        assert_eq!(names, ["1-runs.sh", "2-speed.sh", "3-sanitize.sh", "4-all.sh", "start.sh", "torch_times.py"]);
        assert!(files.iter().all(|file| length(file).is_ok_and(|bytes| bytes > 0)));
    }

    /// Every part and device that a call names exists.
    #[test]
    fn calls_name_parts_of_the_program() {
        let root = repo::root().join(SOURCES);
        let plan = fs::read_to_string(root.join("src/plan.rs")).expect("the plan");
        for file in scripts(&root).expect("scripts").iter().filter(|file| file.extension().is_some_and(|x| x == "sh")) {
            let text = fs::read_to_string(file).expect("a script");
            let lists = text.split("--parts ").skip(1).filter_map(|rest| rest.split_whitespace().next());
            for part in lists.flat_map(|list| list.split(',')) {
                let row = [format!("checks(\"{part}\""), format!("times(\"{part}\"")];
                assert!(row.iter().any(|row| plan.contains(row)), "{}: no part {part}", file.display());
            }
        }
    }

    #[test]
    fn bytes_are_counted_below_a_folder() {
        let calls = repo::root().join(SOURCES).join("calls");
        let apart: u64 = scripts(&repo::root().join(SOURCES))
            .expect("scripts")
            .iter()
            .take(5)
            .map(|f| length(f).expect("a file"))
            .sum();
        assert_eq!(bytes_below(&calls), Ok(apart));
        assert!(tracked_bytes(&repo::root()).is_ok_and(|bytes| bytes > 1 << 20));
    }
}
