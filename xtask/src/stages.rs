//! `cargo xtask test`: the stages in the order they run, cheapest first, and the loop over them.

use std::env::{consts::EXE_SUFFIX, current_exe};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::long_stages::*;
use crate::report::{Outcome, Report};
use crate::{api, book, cuda, downstream, isa, mpi, packages, repo, tidy, tools, watched};

/// One stage of the test command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stage {
    pub name: &'static str,
    pub about: &'static str,
    /// Takes too long for every change: run by hand, by its name or with `--all`.
    pub long: bool,
    action: Action,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    /// One cargo command, with these environment variables.
    Cargo {
        args: &'static [&'static str],
        env: &'static [(&'static str, &'static str)],
    },
    /// `cargo test` of these kinds of targets, of all packages but [`UNTESTED`].
    Tests(&'static [&'static str]),
    /// The same, and this program's own tests.
    AllTests,
    /// The documentation, and the public API that it shows.
    Doc,
    /// Several commands in order.
    Steps(&'static [Step]),
    /// The project's own source checks, in this process.
    Tidy,
    /// Suites at every instruction set.
    Isa,
    /// CUDA's kernels as PTX on the host; or everything that can be known of CUDA without a GPU.
    Ptx,
    Cuda,
    /// Ranks as processes, with the Open MPI that is installed for it, or with the system's.
    Mpi,
    SystemMpi,
    /// The chapters of the book, rendered.
    Book,
    /// A crate that depends on the facade.
    Downstream,
    /// The library crates as packages, and a crate that depends on them.
    Packages,
    /// What a run writes, read by TensorBoard, or shown by a browser.
    TensorBoard,
    Browser,
}

/// One command of several.
#[derive(Debug)]
pub(crate) enum Step {
    Cargo(&'static [&'static str]),
    /// A cargo command with environment variables.
    CargoWith(&'static [(&'static str, &'static str)], &'static [&'static str]),
    /// A program that an earlier step has built, without optimisation, and its arguments.
    Built(&'static str, &'static [&'static str]),
    /// A program that an earlier step has built with optimisation, and a text that its symbols contain, but never
    /// followed by another one.
    Symbols(&'static str, &'static str, &'static str),
    /// A Python program with packages from this folder, and its arguments.
    Python(&'static str, &'static [&'static str]),
}

const fn cargo(name: &'static str, about: &'static str, args: &'static [&'static str]) -> Stage {
    Stage { name, about, long: false, action: Action::Cargo { args, env: &[] } }
}

const fn stage(name: &'static str, about: &'static str, action: Action) -> Stage {
    Stage { name, about, long: false, action }
}

const fn long(name: &'static str, about: &'static str, action: Action) -> Stage {
    Stage { name, about, long: true, action }
}

/// Needs a driver: it has a stage of its own.
pub(crate) const WGPU: &str = "weftgrad-runtime-wgpu";

/// What has no tests that run anywhere. Every stage excludes the same packages: otherwise dependencies have other features and are
/// compiled a second time, for minutes.
const UNTESTED: &[&str] = &[WGPU, "weftgrad-bench", "weftgrad-gpu-check"];

/// Leaves out a package whose tests need Open MPI: they are the stage `mpi`.
pub(crate) const WITHOUT_MPI: [&str; 2] = ["--exclude", "weftgrad-engine-mpi"];

/// The kinds of targets that have tests. Programs are left out, which would be compiled a second time, as tests of nothing: their rules are
/// in libraries, and `tests/smoke.rs` runs them.
const TESTS: &[&str] = &["--lib", "--test", "*"];

/// Every stage, in order.
pub(crate) static STAGES: &[Stage] = &[
    cargo("fmt", "the sources are formatted", &["fmt", "--all", "--check"]),
    stage("tidy", "the project's own rules hold (cargo xtask tidy)", Action::Tidy),
    cargo("clippy", "no lint fires", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    stage(
        "test",
        "unit and integration tests; the example programs run, and the reference values are met",
        Action::AllTests,
    ),
    stage("doctest", "the documentation's examples run", Action::Tests(&["--doc"])),
    stage(
        "doc",
        "the documentation builds without a warning, and the public API is what docs/public-api says",
        Action::Doc,
    ),
    stage("ptx", "CUDA's kernels run on the host, as the PTX that NVIDIA's compiler gives", Action::Ptx),
    stage("mpi", "ranks are processes under Open MPI 5: the suites, faults, examples", Action::Mpi),
    long("isa", "the suites pass at every instruction set of this processor", Action::Isa),
    long("release", "the default members build with only Rust, and their programs run", Action::Steps(RELEASE_STAGE)),
    long("wgpu", "the WebGPU runtime passes the suite, on hardware or on a software driver", Action::Steps(WGPU_STAGE)),
    long("cuda", "CUDA's kernels become machine code, and the suite runs on them as PTX", Action::Cuda),
    long("nccl", "data parallelism, ZeRO and pipelines over NCCL on the host", Action::Steps(NCCL_STAGE)),
    long("mpi-system", "the suites run on the system's Open MPI, 4.1 on Debian", Action::SystemMpi),
    long(
        "formats",
        "images, Parquet, tokenizers, chat templates and the screen of runs, by feature; others read GGUF and ONNX files",
        Action::Steps(FORMATS_STAGE),
    ),
    long("asan", "views, misuse and slots under AddressSanitizer", Action::Steps(ASAN_STAGE)),
    long("valgrind", "misuse under Valgrind, whose instruction sets end at AVX2", Action::Steps(VALGRIND_STAGE)),
    long("kills", "runs that are killed at hundreds of instants go on to the bit", Action::Steps(KILLS_STAGE)),
    long("torch", "random calls, their gradients and second gradients are PyTorch's", Action::Steps(TORCH_STAGE)),
    long("onnx", "the node tests of ONNX's backend suite, made by its package", Action::Steps(ONNX_STAGE)),
    long("real", "models with real weights compute what transformers computes", Action::Steps(REAL_STAGE)),
    long("malformed", "a million changed files for everything that reads files", Action::Steps(MALFORMED_STAGE)),
    long("soak", "strategies, schedules and faults drawn at random", Action::Steps(SOAK_STAGE)),
    long("tensorboard", "TensorBoard reads the event files of a run", Action::TensorBoard),
    long("browser", "a browser shows the report and the pictures of a run", Action::Browser),
    long("book", "mdBook renders the book, and its pages link to each other", Action::Book),
    long("downstream", "a crate outside of the workspace builds with the lines README gives", Action::Downstream),
    long("packages", "the library crates are packaged, and a crate builds on the packages", Action::Packages),
];

/// The stages that `are` holds for, in order.
pub(crate) fn those(are: impl Fn(&Stage) -> bool) -> Vec<Stage> {
    STAGES.iter().filter(|stage| are(stage)).copied().collect()
}

/// Runs `stages` in order up to the first failure and prints the summary, whose last line counts the stages.
pub(crate) fn test(stages: &[Stage], install: bool) -> Result<(), String> {
    let names: Vec<&'static str> = stages.iter().map(|stage| stage.name).collect();
    let missing = tools::ensure(&names, install);
    let report =
        if missing.is_empty() { run_until_failure(stages, execute) } else { Report::blocked(&names, &missing) };
    println!("\n{report}");
    if report.passed() { Ok(()) } else { Err(String::new()) }
}

fn run_until_failure(stages: &[Stage], mut execute: impl FnMut(&Stage) -> Result<(), String>) -> Report {
    let mut report = Report::default();
    for stage in stages {
        let outcome = if report.passed() { timed(|| execute(stage)) } else { Outcome::NotRun };
        report.push(stage.name, outcome);
    }
    report
}

fn timed(work: impl FnOnce() -> Result<(), String>) -> Outcome {
    let start = Instant::now();
    let result = work();
    let seconds = start.elapsed().as_secs_f64();
    match result {
        Ok(()) => Outcome::Passed { seconds },
        Err(why) => Outcome::Failed { seconds, why },
    }
}

fn execute(stage: &Stage) -> Result<(), String> {
    println!("\n==> {}: {}", stage.name, stage.about);
    match stage.action {
        Action::Cargo { args, env } => run_cargo(args, env),
        Action::Tests(targets) => run_cargo(&tests_args(targets), &[]),
        Action::AllTests => {
            run_cargo(&["test", "-p", "weftgrad-xtask", "--bins"], &[])?;
            run_cargo(&[&tests_args(TESTS)[..], &WITHOUT_MPI].concat(), &[])
        }
        Action::Steps(steps) => steps.iter().try_for_each(Step::run),
        Action::Tidy => tidy::run(),
        Action::Doc => document().and_then(|()| api::check()),
        Action::Ptx => cuda::run_ptx(),
        Action::Cuda => cuda::run(),
        Action::Isa => isa::run(),
        Action::Mpi => mpi::run(),
        Action::SystemMpi => mpi::run_system(),
        Action::Book => book::run(),
        Action::Downstream => downstream::run(),
        Action::Packages => packages::run(),
        Action::TensorBoard => watched::run_tensorboard(),
        Action::Browser => watched::run_browser(),
    }
}

/// Builds the documentation of the workspace.
pub(crate) fn document() -> Result<(), String> {
    run_cargo(&["doc", "--workspace", "--no-deps"], &[("RUSTDOCFLAGS", "-D warnings")])
}

/// All packages but [`UNTESTED`].
pub(crate) fn packages<'a>() -> impl Iterator<Item = &'a str> {
    std::iter::once("--workspace").chain(UNTESTED.iter().flat_map(|&package| ["--exclude", package]))
}

pub(crate) fn tests_args<'a>(targets: &[&'a str]) -> Vec<&'a str> {
    // Not fast: one failure must not hide those of the programs after it.
    ["test", "--no-fail-fast"].into_iter().chain(packages()).chain(targets.iter().copied()).collect()
}

impl Step {
    fn run(&self) -> Result<(), String> {
        match self {
            Step::Cargo(args) => run_cargo(args, &[]),
            Step::CargoWith(env, args) => run_cargo(args, env),
            Step::Built(name, args) => {
                let here = current_exe().map_err(|error| format!("where this program lies is unknown: {error}"))?;
                let program = built(&here, name)?;
                println!("$ {} {}", program.display(), args.join(" "));
                run_command(Command::new(program).args(*args), name)
            }
            Step::Symbols(name, text, never) => {
                check_symbols(&repo::root().join("target/release").join(name), text, never)
            }
            Step::Python(packages, args) => {
                let mut python = Command::new("python3");
                run_command(python.args(*args).env("PYTHONPATH", packages), &format!("python3 {}", args.join(" ")))
            }
        }
    }
}

/// The folder where cargo leaves builds without optimization, next to the folder of the program at `here`.
fn built(here: &Path, name: &str) -> Result<PathBuf, String> {
    let target = here.ancestors().nth(2).ok_or(format!("{} lies in no target folder", here.display()))?;
    Ok(target.join("debug").join(format!("{name}{EXE_SUFFIX}")))
}

/// Requires a program whose symbols contain `text`, but never followed by `never`.
fn check_symbols(program: &Path, text: &str, never: &str) -> Result<(), String> {
    let bytes = std::fs::read(program).map_err(|error| format!("{}: {error}", program.display()))?;
    let at = |text: &str| bytes.windows(text.len()).position(|part| part == text.as_bytes());
    if at(text).is_none() {
        return Err(format!("{}: no symbol has `{text}`: it was renamed, or the symbols are gone", program.display()));
    }
    let Some(at) = at(&format!("{text}{never}")) else { return Ok(()) };
    let is_name = |byte: &u8| byte.is_ascii_graphic();
    let from = bytes[..at].iter().rposition(|byte| !is_name(byte)).map_or(0, |before| before + 1);
    let name = bytes[from..].iter().take_while(|byte| is_name(byte)).copied().collect();
    Err(format!("{}: has `{}`", program.display(), String::from_utf8(name).unwrap_or_default()))
}

pub(crate) fn run_cargo(args: &[&str], env: &[(&str, &str)]) -> Result<(), String> {
    let line = shown(args, env);
    println!("$ {line}");
    run_command(Command::new("cargo").args(args).envs(env.iter().copied()), &line)
}

pub(crate) fn run_command(command: &mut Command, shown: &str) -> Result<(), String> {
    match command.current_dir(repo::root()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{shown}` failed: {status}")),
        Err(error) => Err(format!("`{shown}` could not be started: {error}")),
    }
}

/// The command as one would type it.
pub(crate) fn shown(args: &[&str], env: &[(&str, &str)]) -> String {
    let env: String = env.iter().map(|(name, value)| format!("{name}=\"{value}\" ")).collect();
    format!("{env}cargo {}", args.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &[Stage] = &[cargo("a", "", &[]), cargo("b", "", &[]), cargo("c", "", &[])];

    fn run_abc(fails: &str) -> (Vec<&'static str>, Report) {
        let mut ran = Vec::new();
        let report = run_until_failure(ABC, |stage| {
            ran.push(stage.name);
            if stage.name == fails { Err("reason".into()) } else { Ok(()) }
        });
        (ran, report)
    }

    #[test]
    fn every_stage_runs_when_none_fails() {
        let (ran, report) = run_abc("none");
        assert_eq!(ran, ["a", "b", "c"]);
        assert!(report.passed());
    }

    #[test]
    fn nothing_runs_after_a_failure() {
        let (ran, report) = run_abc("b");
        assert_eq!(ran, ["a", "b"]);
        assert!(!report.passed());
    }

    #[test]
    fn commands_are_shown_as_typed() {
        assert_eq!(
            shown(&["doc", "--no-deps"], &[("FLAGS", "-D warnings")]),
            "FLAGS=\"-D warnings\" cargo doc --no-deps"
        );
    }

    #[test]
    fn packages_without_tests_are_left_out() {
        assert_eq!(
            tests_args(&["--doc"]).join(" "),
            "test --no-fail-fast --workspace --exclude weftgrad-runtime-wgpu --exclude weftgrad-bench --exclude weftgrad-gpu-check --doc"
        );
    }

    #[test]
    fn a_built_program_lies_beside_this_one() {
        let program = built(Path::new("/a/target/release/xtask"), "mlp").expect("a target folder");
        assert_eq!(program, Path::new("/a/target/debug").join(format!("mlp{EXE_SUFFIX}")));
        assert!(built(Path::new("xtask"), "mlp").is_err());
    }

    #[test]
    fn a_failed_command_names_itself() {
        let error = run_cargo(&["no-such-subcommand"], &[]).expect_err("fails");
        assert!(error.contains("`cargo no-such-subcommand` failed"), "{error}");
    }

    #[test]
    fn a_symbol_is_found_and_named() {
        let program = std::env::temp_dir().join(format!("symbols-{}", std::process::id()));
        std::fs::write(&program, b"\0_ZN4body7generic8closure17h0E\0_ZN4rest").unwrap();
        let error = check_symbols(&program, "generic", "8clo").expect_err("has it");
        assert!(error.ends_with("has `_ZN4body7generic8closure17h0E`"), "{error}");
        assert_eq!(check_symbols(&program, "generic", "9"), Ok(()));
        assert!(check_symbols(&program, "other", "9").expect_err("renamed").contains("no symbol has `other`"));
        std::fs::remove_file(&program).unwrap();
    }
}
