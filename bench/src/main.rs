//! Times weftgrad on the cases other frameworks are timed on.
//!
//! ```text
//! weftgrad-bench CASE… [--threads N] [--rounds N] [--json]   a table (or JSON) of times per call
//! weftgrad-bench serve [--threads N]                          one case per line on stdin, `<ns per call> <amount>` on stdout
//! ```
//!
//! A case is a name and its sizes: `"gemm 1024 1024 1024"`, `gpt`, `"softmax 4096 1024"`; `list` prints all names. As a server it
//! keeps each case's data between calls, so that a driver can alternate between frameworks; `rss` answers the peak resident
//! KiB, `account USE` the peak KiB of a category (or `total`, `reserved`), `loss CASE` the last loss.
#![forbid(unsafe_code)]

mod serve;
mod table;

use std::process::ExitCode;

use weftgrad::Cpu;
use weftgrad_bench::cases;

/// What was asked for.
struct Args {
    serve: bool,
    json: bool,
    rounds: usize,
    threads: Option<usize>,
    cases: Vec<String>,
}

fn main() -> ExitCode {
    let run = || -> Result<(), String> {
        let args = parse(std::env::args().skip(1))?;
        let cpu = args.threads.map_or_else(Cpu::new, Cpu::with_threads);
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

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args { serve: false, json: false, rounds: 5, threads: None, cases: Vec::new() };
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
