//! Times weftgrad on the cases on which other frameworks are timed.
//!
//! ```text
//! weftgrad-bench CASE… [--threads N] [--simd LEVEL] [--rounds N] [--json]   a table (or JSON) of times per call
//! weftgrad-bench serve [--threads N] [--simd LEVEL]                          one case per line on stdin, `<ns per call> <amount>` on stdout
//! ```
//!
//! A case is a name and its sizes: `"gemm 1024 1024 1024"`, `gpt`, `"softmax 4096 1024"`; `--help` prints all names. As
//! a server, the program keeps each case's data between calls, so that a driver can alternate between frameworks. `rss`
//! answers the peak resident KiB, `account USE` the peak KiB of a category (or `total`, `reserved`), `loss CASE` the
//! last loss. A level is `baseline`, `avx2`, `avx512` or `amx`; a CPU that lacks it takes the highest it has.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod serve;
mod table;

use std::{num::NonZero, process::ExitCode};

use clap::Parser;
use weftgrad::{Cpu, Simd};
use weftgrad_bench::cases;

/// Times weftgrad on the cases that other frameworks are timed on.
#[derive(Parser)]
#[command(after_help = cases::help())]
struct Args {
    /// Cases, each quoted with its sizes; or `serve`: a case per line of standard input.
    #[arg(required = true)]
    cases: Vec<String>,
    /// Threads of the CPU; at first all.
    #[arg(long)]
    threads: Option<NonZero<usize>>,
    /// The instruction level: `baseline`, `avx2`, `avx512`, `avx512bf16` or `amx`.
    #[arg(long, value_parser = level)]
    simd: Option<Simd>,
    /// Measurements of each case.
    #[arg(long, default_value = "5")]
    rounds: NonZero<usize>,
    /// JSON in place of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let run = || -> Result<(), String> {
        let args = Args::parse();
        let mut cpu = Cpu::builder();
        if let Some(threads) = args.threads {
            cpu = cpu.threads(threads.get());
        }
        if let Some(simd) = args.simd {
            cpu = cpu.simd(simd);
        }
        let cpu = cpu.build();
        match args.cases == ["serve"] {
            true => serve::serve(cpu).map_err(|e| e.to_string()),
            false => table::print(cpu, &args.cases, args.rounds.get(), args.json),
        }
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("weftgrad-bench: {message}");
            ExitCode::FAILURE
        }
    }
}

fn level(word: &str) -> Result<Simd, String> {
    Simd::named(word).ok_or_else(|| format!("there are {}", Simd::ALL.map(Simd::name).join(", ")))
}
