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

use program::Program;

/// No program takes this long; one that does hangs.
const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let (seeds, start) = match options() {
        Ok(options) => options,
        Err(why) => {
            eprintln!("soak: {why}\nusage: soak [--seeds N] [--start S]");
            return ExitCode::from(2);
        }
    };
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

fn options() -> Result<(u64, u64), String> {
    let (mut seeds, mut start) = (100, 0);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().and_then(|v| v.parse().ok()).ok_or_else(|| format!("{name} takes a number"))?;
        match &*name {
            "--seeds" => seeds = value,
            "--start" => start = value,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    Ok((seeds, start))
}

fn within(limit: Duration, work: impl FnOnce() -> run::Verdict + Send + 'static) -> run::Verdict {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    result.recv_timeout(limit).unwrap_or_else(|_| Err(format!("it hangs: nothing after {limit:?}, or it panicked")))
}
