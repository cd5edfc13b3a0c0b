//! The stage `downstream`: a crate outside of the workspace, made of the README's code, builds and runs in debug and
//! release.

use std::{fs, path::Path};

use crate::{repo, stages};

/// Where it is written, outside of every workspace.
const FOLDER: &str = "target/downstream";

/// A program of a user.
pub(crate) const MAIN: &str = r#"use weftgrad::prelude::*;

fn main() -> Result<()> {
    let cpu = weftgrad::Cpu::new();
    let x = Tensor::ones(&cpu, [2, 3], DType::F32)?;
    assert_eq!(x.add(&x)?.to_vec::<f32>()?, [2.0; 6]);
    Ok(())
}
"#;

pub(crate) fn run() -> Result<(), String> {
    let readme = fs::read_to_string(repo::root().join("README.md")).map_err(|error| format!("README.md: {error}"))?;
    let folder = repo::root().join(FOLDER);
    write(&folder.join("Cargo.toml"), &manifest(&repo::root(), &profiles(&readme)?))?;
    write(&folder.join("src/main.rs"), MAIN)?;
    let manifest = format!("{FOLDER}/Cargo.toml");
    let run = |more: &[&str]| stages::run_cargo(&[&["run", "--manifest-path", &manifest], more].concat(), &[]);
    run(&[])?;
    run(&["--release"])
}

fn manifest(workspace: &Path, profiles: &str) -> String {
    let facade = workspace.join("weftgrad");
    format!(
        "[package]\nname = \"downstream\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[dependencies]\n\
         weftgrad = {{ path = {:?} }}\n\n[workspace]\n\n{profiles}",
        facade.display().to_string()
    )
}

/// The profiles that the README gives a user.
fn profiles(readme: &str) -> Result<String, String> {
    let blocks = readme.split("```toml\n").skip(1).filter_map(|block| block.split("```").next());
    let lines: String = blocks.filter_map(|block| block.find("[profile").map(|at| &block[at..])).collect();
    if lines.is_empty() { Err("README.md gives no profile for a Cargo.toml".into()) } else { Ok(lines) }
}

/// Writes a file, and the folders it is in.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), String> {
    let folder = path.parent().ok_or_else(|| format!("{} is in no folder", path.display()))?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, text))
        .map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_those_of_the_readme() {
        let readme = "text\n```toml\n[dependencies]\na = 1\n\n[profile.dev]\nopt-level = 3\n```\nmore\n```sh\n[profile.x]\n```\n";
        assert_eq!(profiles(readme).as_deref(), Ok("[profile.dev]\nopt-level = 3\n"));
        assert!(profiles("nothing").is_err());
    }
}
