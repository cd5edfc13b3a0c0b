//! The command line: its commands, and the message for an argument that is not understood.

use std::path::PathBuf;

use crate::stages::{self, Stage};

/// The command that the user gave.
#[derive(Debug)]
pub enum Command {
    Help,
    Test { install: bool, stages: Vec<&'static Stage> },
    Tidy,
    Api,
    Goldens { from: PathBuf },
    Hot,
    Mutants { here: bool, part: String },
}

/// Reads the arguments after `cargo xtask`; the error names the argument that was not understood.
pub fn parse(args: &[String]) -> Result<Command, String> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        [] | ["help" | "--help" | "-h", ..] => Ok(Command::Help),
        ["test", rest @ ..] => parse_test(rest),
        ["tidy"] => Ok(Command::Tidy),
        ["api"] => Ok(Command::Api),
        ["goldens", from] => Ok(Command::Goldens { from: PathBuf::from(from) }),
        ["hot"] => Ok(Command::Hot),
        ["fuzz", "--against", "torch"] => parse_test(&["torch"]),
        ["fuzz", ..] => Err("fuzz: give --against torch".into()),
        ["mutants"] => Ok(Command::Mutants { here: false, part: String::new() }),
        ["mutants", "--here"] => Ok(Command::Mutants { here: true, part: String::new() }),
        ["mutants", "--here", part] => Ok(Command::Mutants { here: true, part: (*part).into() }),
        ["mutants", part] => Ok(Command::Mutants { here: false, part: (*part).into() }),
        ["mutants", ..] => Err("mutants: give --here or not, and a part of files' paths".into()),
        ["goldens", ..] => Err("goldens: give the one folder to copy from".into()),
        [name @ ("tidy" | "api" | "hot"), extra, ..] => Err(format!("{name} takes no argument, found `{extra}`")),
        [other, ..] => Err(format!("unknown command `{other}`")),
    }
}

/// Every command and every stage.
pub fn usage() -> String {
    let row = |s: &Stage| format!("\n  {:<11}{}{}", s.name, s.about, if s.long { " (long)" } else { "" });
    let stages: String = stages::STAGES.iter().map(row).collect();
    format!(
        "\
usage: cargo xtask COMMAND
  test [--install] [STAGE]  run the stages in order, or the one named; --install gets missing tools first
  test --all [--install]    the same with the long stages, which are for hand
  tidy                      check the sources against the project's own rules
  api                       write the public API of every crate (docs/public-api)
  goldens DIR               copy reference values (*.json, *.safetensors) of DIR into conformance/goldens
  hot                       print the processor's hot programs as Rust (runtime-cpu/src/pointwise/compile/hot.rs)
  fuzz --against torch      the stage `torch`: random calls, with PyTorch's values, gradients and second gradients
  mutants [--here] [PART]   put faults into files whose path contains PART, one at a time: a test must notice each
  help                      this page

stages of test:{stages}"
    )
}

fn parse_test(args: &[&str]) -> Result<Command, String> {
    let (options, names): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| arg.starts_with('-'));
    if let Some(unknown) = options.iter().find(|&&option| !["--install", "--all"].contains(&option)) {
        return Err(format!("test: unknown option `{unknown}`; there are --install and --all"));
    }
    let all = options.contains(&"--all");
    let stages = match names.as_slice() {
        [name, ..] if all => return Err(format!("test: --all runs every stage, leave out `{name}`")),
        [] => stages::STAGES.iter().filter(|stage| all || !stage.long).collect(),
        [name] => vec![stages::find(name).ok_or_else(|| format!("test: unknown stage `{name}`"))?],
        [_, extra, ..] => return Err(format!("test: one stage at a time, found `{extra}` too")),
    };
    Ok(Command::Test { install: options.contains(&"--install"), stages })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str) -> Result<Command, String> {
        parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    fn misuse(line: &str) -> String {
        check(line).expect_err("a misuse")
    }

    #[test]
    fn test_alone_leaves_the_long_stages_out() {
        let Ok(Command::Test { install: false, stages }) = check("test") else { panic!("not a test") };
        assert!(stages.iter().all(|stage| !stage.long));
        let Ok(Command::Test { install: true, stages: all }) = check("test --all --install") else {
            panic!("not a test")
        };
        assert_eq!((all.len(), stages.len()), (stages::STAGES.len(), all.iter().filter(|stage| !stage.long).count()));
    }

    #[test]
    fn test_takes_its_option_on_either_side_of_the_stage() {
        for line in ["test --install fmt", "test fmt --install"] {
            let Ok(Command::Test { install: true, stages }) = check(line) else { panic!("{line}") };
            assert_eq!(stages.iter().map(|s| s.name).collect::<Vec<_>>(), ["fmt"]);
        }
    }

    #[test]
    fn misuse_is_named() {
        assert!(misuse("test nonsense").contains("unknown stage `nonsense`"));
        assert!(misuse("test --force").contains("unknown option `--force`"));
        assert!(misuse("test fmt clippy").contains("`clippy`"));
        assert!(misuse("test --all fmt").contains("`fmt`"));
        assert!(misuse("frobnicate").contains("unknown command `frobnicate`"));
        assert!(misuse("goldens").contains("folder"));
        assert!(misuse("tidy now").contains("`now`"));
        assert!(misuse("api now").contains("`now`"));
        assert!(misuse("hot now").contains("`now`"));
        assert!(misuse("fuzz --against jax").contains("--against torch"));
    }

    #[test]
    fn usage_lists_every_stage() {
        let usage = usage();
        assert!(stages::STAGES.iter().all(|stage| usage.contains(&format!("\n  {:<11}", stage.name))));
    }

    #[test]
    fn help_and_the_plain_commands_are_understood() {
        assert!(matches!(check(""), Ok(Command::Help)));
        assert!(matches!(check("help"), Ok(Command::Help)));
        assert!(matches!(check("tidy"), Ok(Command::Tidy)));
        assert!(matches!(check("api"), Ok(Command::Api)));
        assert!(matches!(check("hot"), Ok(Command::Hot)));
        assert!(matches!(check("goldens a/b"), Ok(Command::Goldens { from }) if from == *"a/b"));
    }
}
