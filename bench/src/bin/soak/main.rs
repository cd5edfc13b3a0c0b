//! Random programs on random numbers of ranks, with and without a fault: none may hang, diverge silently, leak, or lose
//! a checkpoint.
//!
//! `soak --seeds N --start S` runs seeds `S .. S + N`. It prints the seed of the first that fails, and exits with
//! status 1.
#![forbid(unsafe_code)]

mod program;
mod run;
mod task;
mod train;
mod trainers;

use std::{
    process::ExitCode,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use program::Program;

/// The time after which a program counts as hanging; none takes this long.
const LIMIT: Duration = Duration::from_secs(120);

/// Draws training programs at random, and checks each.
#[derive(Parser)]
struct Options {
    /// The number of programs.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The seed of the first.
    #[arg(long, default_value_t = 0)]
    start: u64,
}

fn main() -> ExitCode {
    let Options { seeds, start } = Options::parse();
    let begun = Instant::now();
    for seed in start..start.saturating_add(seeds) {
        let program = Program::of(seed);
        if let Err(why) = within(LIMIT, move || run::check(&Program::of(seed))) {
            eprintln!("seed {seed}: {program:?}\n{why}");
            return ExitCode::FAILURE;
        }
    }
    println!(
        "{seeds} programs from seed {start}: none hung, diverged, leaked or lost a checkpoint ({:.0?})",
        begun.elapsed()
    );
    ExitCode::SUCCESS
}

fn within(limit: Duration, work: impl FnOnce() -> run::Verdict + Send + 'static) -> run::Verdict {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    result.recv_timeout(limit).unwrap_or_else(|_| Err(format!("it hangs: nothing after {limit:?}, or it panicked")))
}
