//! `weftgrad-replay`: takes one step of a run again, by the program that trained.
#![forbid(unsafe_code)]

use std::{
    path::PathBuf,
    process::{Command, ExitCode},
};

use clap::Parser;
use train::StepReplay;

/// Runs COMMAND as a replay: one step of its run, from the nearest checkpoint, by threads of one process.
///
/// COMMAND is the command of the run, with the options by which it would go on from its checkpoints, without a launcher
/// before it. Its ranks must come from `weftgrad::Launcher`. The output has the ranks of the step, and the op call in which
/// NaN begins, with its operands on all ranks. Nothing is saved.
#[derive(Parser)]
#[command(version, name = "weftgrad-replay")]
struct Options {
    /// The folder of the run's checkpoints.
    folder: PathBuf,
    /// The step.
    #[arg(long)]
    step: u64,
    /// The number of the time that the run took it, from 0 [default: the last one].
    #[arg(long)]
    attempt: Option<usize>,
    /// Prints all op calls of this rank [default for `--call`: 0].
    #[arg(long)]
    rank: Option<usize>,
    /// Prints the operands of the call of this number on that rank, and of the same call on all others, with values.
    #[arg(long)]
    call: Option<usize>,
    /// The folder for states on the way, as large as a checkpoint [default: that for temporary files].
    #[arg(long)]
    scratch: Option<PathBuf>,
    /// The command of the run.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    let Options { folder, step, attempt, rank, call, scratch, command } = Options::parse();
    let replay = StepReplay::of(folder, step);
    let replay = attempt.into_iter().fold(replay, StepReplay::attempt);
    let replay = scratch.into_iter().fold(replay, StepReplay::scratch);
    let replay = call.into_iter().fold(replay, StepReplay::values_of);
    let replay = rank.into_iter().fold(replay, StepReplay::show_rank);
    let (program, arguments) = command.split_first().map_or(("", &[][..]), |(first, rest)| (first, rest));
    let (name, value) = replay.variable();
    match Command::new(program).args(arguments).env(name, value).status() {
        Ok(status) => status.code().map_or(ExitCode::FAILURE, |code| ExitCode::from(code as u8)),
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}
