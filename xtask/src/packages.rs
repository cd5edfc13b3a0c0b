//! The stage `packages`: the library crates are packaged as for a registry, and a crate outside of the workspace builds on the packages,
//! with each feature of the facade.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::downstream::{MAIN, write};
use crate::{repo, stages};

/// What is for this repository alone, and has `publish = false`.
const PRIVATE: &[&str] = &["weftgrad-xtask", "weftgrad-bench", "weftgrad-examples", "weftgrad-gpu-check"];

/// Where the crate that depends on the packages is written.
const FOLDER: &str = "target/packaged";

/// Features that need nothing but Rust. `mpi` needs Open MPI, and is built in the stages that have it.
const FEATURES: &[&str] = &[
    "data",
    "distributed",
    "adaptive",
    "watch",
    "train",
    "models",
    "linalg",
    "planner",
    "export",
    "import",
    "arrow",
    "audio",
    "image",
    "parquet",
    "text",
    "full",
    "cuda",
    "nccl",
    "wgpu",
];

pub(crate) fn run() -> Result<(), String> {
    let mut package = vec!["package", "--workspace", "--allow-dirty"];
    package.extend(PRIVATE.iter().flat_map(|name| ["--exclude", name]));
    // A folder of this run's own: cargo would take packages that an earlier one has built, while their versions are the same.
    let target = format!("target/packages-{}", std::process::id());
    stages::run_cargo(&package, &[("CARGO_TARGET_DIR", &target)])?;

    let (folder, target) = (repo::root().join(FOLDER), repo::root().join(target));
    // Cargo unpacks what it has packaged there, in order to build it.
    write(&folder.join("Cargo.toml"), &manifest(&packages(&target.join("package"))?))?;
    write(&folder.join("src/main.rs"), MAIN)?;
    let manifest = format!("{FOLDER}/Cargo.toml");
    stages::run_cargo(&["run", "--manifest-path", &manifest], &[])?;
    for feature in FEATURES {
        stages::run_cargo(&["check", "--manifest-path", &manifest, "--features", feature], &[])?;
    }
    fs::remove_dir_all(&target).map_err(|error| format!("{}: {error}", target.display()))
}

/// Name and folder of every package that is unpacked in `unpacked`, in order of names.
fn packages(unpacked: &Path) -> Result<Vec<(String, PathBuf)>, String> {
    let entries = fs::read_dir(unpacked).map_err(|error| format!("{}: {error}", unpacked.display()))?;
    let folders = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.join("Cargo.toml").is_file());
    let named = |path: PathBuf| Some((name(path.file_name()?.to_str()?)?.to_string(), path));
    let mut packages: Vec<_> = folders.filter_map(named).collect();
    packages.sort();
    Ok(packages)
}

/// The name of a package in a folder called `weftgrad-nn-0.1.0`.
fn name(folder: &str) -> Option<&str> {
    let (name, version) = folder.rsplit_once('-')?;
    (name.starts_with("weftgrad") && version.starts_with(|c: char| c.is_ascii_digit())).then_some(name)
}

/// A crate whose registry is replaced by these packages.
fn manifest(packages: &[(String, PathBuf)]) -> String {
    let mut text = String::from(
        "[package]\nname = \"packaged\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[dependencies]\nweftgrad = \"0.1\"\n\n[features]\n",
    );
    for feature in FEATURES {
        let _ = writeln!(text, "{feature} = [\"weftgrad/{feature}\"]");
    }
    text.push_str("\n[workspace]\n\n[patch.crates-io]\n");
    for (name, folder) in packages {
        let _ = writeln!(text, "{name} = {{ path = {:?} }}", folder.display().to_string());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_tells_its_package() {
        assert_eq!(name("weftgrad-nn-derive-0.1.0"), Some("weftgrad-nn-derive"));
        assert_eq!(name("weftgrad-0.1.0"), Some("weftgrad"));
        assert_eq!(name("tmp-crate"), None);
    }

    #[test]
    fn every_package_and_feature_is_in_the_manifest() {
        let text = manifest(&[("weftgrad-nn".into(), PathBuf::from("a/weftgrad-nn-0.1.0"))]);
        assert!(text.contains("[patch.crates-io]\nweftgrad-nn = { path = \"a/weftgrad-nn-0.1.0\" }\n"));
        assert!(FEATURES.iter().all(|feature| text.contains(&format!("\n{feature} = [\"weftgrad/{feature}\"]\n"))));
    }
}
