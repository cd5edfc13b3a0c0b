//! The workspace's own commands, `cargo xtask COMMAND`: run the checks, keep the sources tidy, refresh reference
//! values.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod api;
mod book;
mod cli;
mod cuda;
mod downstream;
mod goldens;
mod gpu;
mod isa;
mod long_stages;
mod mpi;
mod mutants;
mod packages;
mod repo;
mod report;
mod stages;
mod tidy;
mod tools;
mod watched;

use std::process::ExitCode;

use clap::Parser;

use cli::{Args, Command};

fn main() -> ExitCode {
    exit_code(run(Args::parse().command))
}

/// The generator of the AOT-compiled programs depends on runtimes and optimizers, on which this program must not
/// depend.
const HOT: &[&str] = &["test", "-p", "weftgrad-runtime-cpu", "--test", "all", "hot::the_file"];

fn run(command: Command) -> Result<(), String> {
    match command {
        Command::Test { install, all, stages } if stages.is_empty() => {
            stages::test(&stages::those(|stage| all || !stage.long), install)
        }
        Command::Test { install, stages, .. } => stages::test(&stages, install),
        Command::Fuzz { against } => stages::test(&stages::those(|stage| stage.name == against), false),
        Command::Tidy => tidy::run(),
        Command::Api => stages::document().and_then(|()| api::refresh()),
        Command::Hot => stages::run_cargo(HOT, &[("WEFTGRAD_WRITE_HOT", "1")]),
        Command::Gpu => gpu::pack(),
        Command::Mutants { here, part } => mutants::run(here, &part),
        Command::Goldens { from } => goldens::refresh(&from, &repo::root().join("conformance/goldens")),
    }
}

/// An empty message is a failure that has already been reported in full.
fn exit_code(outcome: Result<(), String>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            if !message.is_empty() {
                eprintln!("{message}");
            }
            ExitCode::FAILURE
        }
    }
}
