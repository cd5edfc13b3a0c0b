//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum, builder::PossibleValue};

use crate::stages::{STAGES, Stage};

/// The workspace's own commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub(crate) struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the stages in order, or those that are named; `help test` lists them
    Test {
        /// Get missing tools first
        #[arg(long)]
        install: bool,
        /// Run the long stages too, which are for hand
        #[arg(long, conflicts_with = "stages")]
        all: bool,
        #[arg(value_enum, value_name = "STAGE")]
        stages: Vec<Stage>,
    },
    /// Check the sources against the project's own rules
    Tidy,
    /// Write the public API of every crate (docs/public-api)
    Api,
    /// Copy reference values (*.json, *.safetensors) into conformance/goldens
    Goldens {
        /// The folder to copy from
        #[arg(value_name = "DIR")]
        from: PathBuf,
    },
    /// Write the processor's hot programs as Rust (runtime-cpu/src/pointwise/compile/hot.rs)
    Hot,
    /// Pack what a machine with a GPU and without Rust needs, kernels compiled (.gpu)
    Gpu,
    /// Random calls, with PyTorch's values, gradients and second gradients: the stage `torch`
    Fuzz {
        #[arg(long, value_parser = ["torch"])]
        against: String,
    },
    /// Put faults into files, one at a time: a test must notice each
    Mutants {
        /// Put them into this checkout, which must have no changes, and not into a copy
        #[arg(long)]
        here: bool,
        /// Part of the files' paths
        #[arg(default_value = "")]
        part: String,
    },
}

impl ValueEnum for Stage {
    fn value_variants<'a>() -> &'a [Stage] {
        STAGES
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let about = format!("{}{}", self.about, if self.long { " (long)" } else { "" });
        Some(PossibleValue::new(self.name).help(about))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        let args = Args::try_parse_from(["xtask"].into_iter().chain(line.split_whitespace()));
        args.map(|args| args.command).map_err(|error| error.to_string())
    }

    #[test]
    fn the_commands_make_sense() {
        Args::command().debug_assert();
    }

    #[test]
    fn test_takes_its_option_on_either_side_of_the_stages() {
        for line in ["test --install fmt isa", "test fmt isa --install"] {
            let Ok(Command::Test { install: true, all: false, stages }) = parsed(line) else { panic!("{line}") };
            assert_eq!(stages.iter().map(|s| s.name).collect::<Vec<_>>(), ["fmt", "isa"]);
        }
    }

    #[test]
    fn stages_have_names_of_their_own() {
        let names: std::collections::BTreeSet<&str> = STAGES.iter().map(|stage| stage.name).collect();
        assert_eq!(names.len(), STAGES.len());
    }

    #[test]
    fn a_wrong_stage_lists_the_stages() {
        let misuse = parsed("test nonsense").expect_err("a misuse");
        assert!(STAGES.iter().all(|stage| misuse.contains(stage.name)), "{misuse}");
    }

    #[test]
    fn misuse_is_refused() {
        for line in ["", "test --all fmt", "goldens", "tidy now", "fuzz", "fuzz --against jax"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
