//! Checks and times a GPU, from one file that needs nothing but NVIDIA's driver and the CUDA libraries.
//!
//! ```text
//! weftgrad-gpu-check [--device cuda|cpu] [--out FILE] [--quick] [--skip PART]…
//! ```
//!
//! Runs, in this order: the conformance suite (`suite`), PyTorch's values group by group, the training runs among them
//! (`goldens`), a GPT's loss and every gradient against the processor (`parity`), and the benchmark cases (`bench`). Prints a table, writes
//! the same as JSON to FILE (`gpu-check.json`), and ends with status 1 if anything failed, 2 if it could not start.
//!
//! PyTorch's values are inside the program. The CUDA libraries are taken from the system, or from Python's packages
//! (`pip install nvidia-cuda-nvrtc nvidia-cublas`), which are looked for by asking `python3`.
#![forbid(unsafe_code)]

mod bench;
mod goldens;
mod libraries;
mod parity;
mod report;
mod suite;

use std::process::ExitCode;

use weftgrad::{Cpu, Cuda, Runtime};

use report::Report;

const USAGE: &str =
    "usage: weftgrad-gpu-check [--device cuda|cpu] [--out FILE] [--quick] [--skip suite|goldens|parity|bench]...";

/// What was asked for.
struct Args {
    device: String,
    out: String,
    quick: bool,
    skip: Vec<String>,
}

fn main() -> ExitCode {
    let run = || -> Result<u8, String> {
        let args = parse(std::env::args().skip(1))?;
        if let Some(status) = libraries::in_surroundings(&goldens::unpack()?)? {
            return Ok(status);
        }
        let passed = match args.device.as_str() {
            "cpu" => check(&Cpu::new(), &args)?,
            _ => check(&Cuda::new(0).map_err(|e| e.to_string())?, &args)?,
        };
        Ok(u8::from(!passed))
    };
    match run() {
        Ok(status) => ExitCode::from(status),
        Err(message) => {
            eprintln!("weftgrad-gpu-check: {message}");
            ExitCode::from(2)
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args { device: "cuda".into(), out: "gpu-check.json".into(), quick: false, skip: Vec::new() };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value; {USAGE}"));
        match word.as_str() {
            "--device" => args.device = value()?,
            "--out" => args.out = value()?,
            "--quick" => args.quick = true,
            "--skip" => args.skip.push(value()?),
            _ => return Err(format!("unknown option {word}; {USAGE}")),
        }
    }
    if !["cpu", "cuda"].contains(&args.device.as_str()) {
        return Err(format!("`{}` is no device; {USAGE}", args.device));
    }
    Ok(args)
}

/// Everything, on one device; whether all of it passed.
fn check<R: Runtime>(rt: &R, args: &Args) -> Result<bool, String> {
    let mut report = Report::new(rt);
    let wanted = |part: &str| !args.skip.iter().any(|s| s == part);
    if wanted("suite") {
        suite::run(rt, &mut report);
    }
    if wanted("goldens") {
        goldens::run(rt, &mut report);
    }
    if wanted("parity") {
        parity::run(rt, &mut report);
    }
    if wanted("bench") {
        bench::run(rt, args.quick, &mut report);
    }
    report.write(&args.out)?;
    Ok(report.passed())
}
