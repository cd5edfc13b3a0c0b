//! Answers requests about a pretrained model, one per line of standard input. So a driver can alternate with another
//! framework's worker, as `bench/pretrained/compare.py` does with transformers.
//!
//! ```text
//! pretrained FOLDER [--threads N] [--simd LEVEL]
//! load              reads the model: nanoseconds, parameters
//! decode P N        continues P tokens by N, greedily: nanoseconds a token, the tokens
//! lora B T          a step of the adapter in FOLDER/adapter on B texts of T tokens: nanoseconds, the loss
//! lora4bit B T      the same with the layers of the model in four bits
//! read N            sums N numbers of 32 bits: nanoseconds, N
//! rss               the peak resident KiB, and the peak KiB of the runtime's account
//! ```
#![forbid(unsafe_code)]

mod requests;

use std::{
    io::{self, BufRead, Write},
    path::PathBuf,
    process::ExitCode,
};

use clap::Parser;
use weftgrad::{Cpu, Simd};

use requests::Server;

/// Answers requests about a pretrained model.
#[derive(Parser)]
struct Options {
    /// The folder that holds the model.
    folder: PathBuf,
    /// Threads of the CPU; at first all.
    #[arg(long)]
    threads: Option<usize>,
    /// The name of an instruction level.
    #[arg(long, value_parser = |name: &str| Simd::named(name).ok_or("no such level"))]
    simd: Option<Simd>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("pretrained: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let Options { folder, threads, simd } = Options::parse();
    let mut cpu = Cpu::builder();
    if let Some(threads) = threads {
        cpu = cpu.threads(threads);
    }
    if let Some(simd) = simd {
        cpu = cpu.simd(simd);
    }
    let (mut server, mut out) = (Server::new(folder, cpu.build()), io::stdout().lock());
    for line in io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = server.answer(&words).unwrap_or_else(|e| format!("nan {e}"));
        writeln!(out, "{answer}").and_then(|()| out.flush()).map_err(|e| e.to_string())?;
    }
    Ok(())
}
