//! `weftgrad-watch`: runs in a terminal, while they train or afterwards.
#![forbid(unsafe_code)]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;

/// Shows the curves of runs over each other, the values of their ranks, and memory.
///
/// It reads what the sink `Jsonl` writes, and disturbs no run. Where its output is no terminal, it prints one screen.
#[derive(Parser)]
#[command(version, name = "weftgrad-watch")]
struct WatchArguments {
    /// Folders of runs, or their files of JSON Lines; they may not exist yet.
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// Seconds between two looks at the files.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: u64,
}

fn main() -> ExitCode {
    let options = WatchArguments::parse();
    match watch::screen::show(&options.runs, Duration::from_secs(options.every)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
