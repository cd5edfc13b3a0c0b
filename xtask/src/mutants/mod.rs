//! `cargo xtask mutants`: faults that are put into the sources one after another, each of which a test must notice.
//!
//! They are put into a copy of the last commit, below `target/mutants`, whose builds are kept there; or, with `--here`, into this checkout, which
//! must have no changes, and whose builds are there already.

mod families;
mod jobs;
mod kernels;
mod list;
mod tape;
mod training;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use families::FAMILIES;
use jobs::OF_JOBS;
use kernels::OF_KERNELS;
use list::MUTANTS;
use tape::TAPE;
use training::TRAINING;

use crate::repo;

/// A fault: in `file` stands `from`, once, which becomes `to`; then the cargo command `test` must fail.
#[derive(Debug)]
pub(crate) struct Mutant {
    pub file: &'static str,
    pub from: &'static str,
    pub to: &'static str,
    pub test: &'static [&'static str],
}

/// What became of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Caught,
    /// Tests that never end notice it, too.
    Hung,
    Survived,
    DoesNotBuild,
}

/// Tests end long before, unless a fault makes them wait for good.
const MOST: Duration = Duration::from_secs(120);

/// All faults.
fn all() -> impl Iterator<Item = &'static Mutant> {
    MUTANTS.iter().chain(TRAINING).chain(TAPE).chain(FAMILIES).chain(OF_JOBS).chain(OF_KERNELS)
}

/// Tries the faults whose file's path contains `part`, and prints what became of each.
pub(crate) fn run(here: bool, part: &str) -> Result<(), String> {
    let tree = if here { unchanged()? } else { copied()? };
    let chosen: Vec<&Mutant> = all().filter(|mutant| mutant.file.contains(part)).collect();
    let mut fates = Vec::new();
    let mut passed: Vec<&[&str]> = Vec::new();
    for mutant in chosen {
        if !passed.contains(&mutant.test) {
            match tried(&tree, mutant.test)? {
                Fate::Survived => passed.push(mutant.test),
                fate => return Err(format!("without a fault, `cargo {}`: {fate:?}", mutant.test.join(" "))),
            }
        }
        let fate = with_fault(&tree, mutant, || tried(&tree, mutant.test))?;
        println!("{fate:?}\t{}: `{}` as `{}`", mutant.file, mutant.from.trim(), mutant.to.trim());
        fates.push(fate);
    }
    let count = |fate| fates.iter().filter(|&&other| other == fate).count();
    let noticed = count(Fate::Caught) + count(Fate::Hung);
    println!("{noticed} of {} were noticed, {} survived", fates.len(), count(Fate::Survived));
    if noticed == fates.len() { Ok(()) } else { Err("mutants: some faults were not noticed".into()) }
}

/// This checkout.
fn unchanged() -> Result<PathBuf, String> {
    let root = repo::root().to_path_buf();
    let changes =
        output(Command::new("git").args(["status", "--porcelain", "--untracked-files=no"]).current_dir(&root))?;
    if changes.is_empty() {
        Ok(root)
    } else {
        Err(format!("mutants: --here needs a checkout without changes:\n{changes}"))
    }
}

/// A checkout of the last commit of its own.
fn copied() -> Result<PathBuf, String> {
    let root = repo::root().to_path_buf();
    let tree = root.join("target/mutants/tree");
    let commit = output(Command::new("git").args(["rev-parse", "HEAD"]).current_dir(&root))?;
    if tree.is_dir() {
        output(Command::new("git").args(["checkout", "--force", "--detach", commit.trim()]).current_dir(&tree))?;
    } else {
        let place = tree.to_string_lossy().into_owned();
        output(Command::new("git").args(["worktree", "add", "--detach", &place, commit.trim()]).current_dir(&root))?;
    }
    Ok(tree)
}

fn output(command: &mut Command) -> Result<String, String> {
    let made = command.output().map_err(|error| format!("mutants: git could not be started: {error}"))?;
    if !made.status.success() {
        return Err(format!("mutants: git failed: {}", String::from_utf8_lossy(&made.stderr)));
    }
    Ok(String::from_utf8_lossy(&made.stdout).into_owned())
}

/// Runs `then` with the fault in its file, which is as before afterwards.
fn with_fault<T>(tree: &Path, mutant: &Mutant, then: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let file = tree.join(mutant.file);
    let failed = |error| format!("mutants: {}: {error}", file.display());
    let text = fs::read_to_string(&file).map_err(failed)?;
    fs::write(&file, text.replacen(mutant.from, mutant.to, 1)).map_err(failed)?;
    let done = then();
    fs::write(&file, text).map_err(failed)?;
    done
}

/// Builds the tests, and runs them.
fn tried(tree: &Path, test: &[&str]) -> Result<Fate, String> {
    let cut = test.iter().position(|arg| *arg == "--").unwrap_or(test.len());
    let (build, rest) = test.split_at(cut);
    let built = start(tree, &[build, &["--no-run"]].concat())?.wait().map_err(|error| error.to_string())?;
    if !built.success() {
        return Ok(Fate::DoesNotBuild);
    }
    let mut child = start(tree, &[build, rest].concat())?;
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok(if status.success() { Fate::Survived } else { Fate::Caught });
        }
        if begun.elapsed() > MOST {
            end(&mut child);
            return Ok(Fate::Hung);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn start(tree: &Path, args: &[&str]) -> Result<Child, String> {
    let mut cargo = Command::new("cargo");
    cargo.args(args).current_dir(tree).stdout(Stdio::null()).stderr(Stdio::null());
    if tree != repo::root() {
        cargo.env("CARGO_TARGET_DIR", repo::root().join("target/mutants/target"));
    }
    // A group of its own, so that the tests end with cargo.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut cargo, 0);
    cargo.spawn().map_err(|error| format!("mutants: cargo could not be started: {error}"))
}

fn end(child: &mut Child) {
    #[cfg(unix)]
    let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status();
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_has_one_place() {
        let mut wrong = Vec::new();
        for mutant in all() {
            let text = fs::read_to_string(repo::root().join(mutant.file)).expect(mutant.file);
            let places = text.matches(mutant.from).count();
            if places != 1 {
                wrong.push(format!("{}: {places} places of {}", mutant.file, mutant.from));
            }
            assert_ne!(mutant.from, mutant.to);
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
