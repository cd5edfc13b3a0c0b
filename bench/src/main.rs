//! Times weftgrad on the cases that other frameworks are timed on.
//!
//! ```text
//! weftgrad-bench CASE… [--threads N] [--simd LEVEL] [--rounds N] [--json]   a table (or JSON) of times per call
//! weftgrad-bench serve [--threads N] [--simd LEVEL]                          one case per line on stdin, `<ns per call> <amount>` on stdout
//! ```
//!
//! A case is a name and its sizes: `"gemm 1024 1024 1024"`, `gpt`, `"softmax 4096 1024"`; `list` prints all names. As a
//! server it keeps each case's data between calls, so that a driver can alternate between frameworks; `rss` answers the
//! peak resident KiB, `account USE` the peak KiB of a category (or `total`, `reserved`), `loss CASE` the last loss. A
//! level is `baseline`, `avx2`, `avx512` or `amx`; a CPU that lacks it takes the highest it has.
#![forbid(unsafe_code)]

mod serve;
mod table;

use std::process::ExitCode;

use weftgrad::{Cpu, Simd};
use weftgrad_bench::cases;

/// The parsed command line.
struct Args {
    serve: bool,
    json: bool,
    rounds: usize,
    threads: Option<usize>,
    simd: Option<Simd>,
    cases: Vec<String>,
}

fn main() -> ExitCode {
    let run = || -> Result<(), String> {
        let args = parse(std::env::args().skip(1))?;
        let mut cpu = Cpu::builder();
        if let Some(threads) = args.threads {
            cpu = cpu.threads(threads);
        }
        if let Some(simd) = args.simd {
            cpu = cpu.simd(simd);
        }
        let cpu = cpu.build();
        match args.serve {
            true => serve::serve(cpu).map_err(|e| e.to_string()),
            false => table::print(cpu, &args.cases, args.rounds, args.json),
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

fn level(word: Option<&str>) -> Result<Simd, String> {
    word.and_then(Simd::named).ok_or_else(|| format!("--simd needs {}", Simd::ALL.map(Simd::name).join(", ")))
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args { serve: false, json: false, rounds: 5, threads: None, simd: None, cases: Vec::new() };
    while let Some(word) = words.next() {
        let mut number = || {
            let value = words.next().ok_or_else(|| format!("{word} needs a number"))?;
            value
                .parse::<usize>()
                .ok()
                .filter(|n| *n > 0)
                .ok_or_else(|| format!("{word}: `{value}` is not a positive number"))
        };
        match word.as_str() {
            "serve" => args.serve = true,
            "--json" => args.json = true,
            "--rounds" => args.rounds = number()?,
            "--threads" => args.threads = Some(number()?),
            "--simd" => args.simd = Some(level(words.next().as_deref())?),
            "--help" | "-h" | "list" => return Err(cases::help()),
            _ if word.starts_with('-') => return Err(format!("unknown option {word}; see --help")),
            _ => args.cases.push(word),
        }
    }
    if !args.serve && args.cases.is_empty() {
        return Err(cases::help());
    }
    Ok(args)
}
