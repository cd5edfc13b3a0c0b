//! Checks and times a GPU, from one file that needs nothing but NVIDIA's driver and the CUDA libraries.
//!
//! ```text
//! weftgrad-gpu-check [--device cuda|cpu|wgpu] [--parts A,B] [--skip A,B] [--only TEXT]... [--quick]
//!                    [--minutes M] [--jobs N] [--out FILE] [--list] [--precompile 90,13]
//! ```
//!
//! Work is divided into parts, and parts into items (`--list` names them). Every item is a separate process with a
//! deadline. So a crash, a hang or a broken context costs one item, and no item waits for another to pass. Checks run
//! several at a time (`--jobs`), as compiling kernels is most of their work; timed items run alone. A failed item of a
//! GPU runs once more with blocking launches, which names the kernel.
//!
//! The run ends within `--minutes` (9 by default); items not begun by then are listed as not run. After every item a
//! line is printed, and all findings so far are written as JSON to FILE (`gpu-check.json`). At the end at most ten
//! lines list failures and slow cases. The exit status is 0 if all requested items ran and passed, 1 if not, 2 if the
//! program could not start.
//!
//! Kernels can be compiled on a machine without a GPU, by a program that was built with the feature `emulate`.
//! `--precompile 90,13` compiles for GPUs of that compute capability and drivers of that version of CUDA. The kernels
//! go into the folder that `XDG_CACHE_HOME` names, which then travels with the program.
//!
//! PyTorch's values and the script that times PyTorch are inside the program. The CUDA libraries are taken from the
//! system, or from Python's packages (`pip install nvidia-cuda-nvrtc nvidia-cublas`), which are located through
//! `python3`.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod args;
mod bench;
mod copies;
mod goldens;
mod graph;
mod ladder;
mod libraries;
mod losses;
mod nccl;
mod parity;
mod plan;
mod profile;
mod report;
mod sanitize;
mod suite;
mod supervise;
mod torch;

use std::process::ExitCode;

use args::Args;
use clap::Parser;
use report::Found;

fn main() -> ExitCode {
    match run() {
        Ok(status) => ExitCode::from(status),
        Err(message) => {
            eprintln!("weftgrad-gpu-check: {message}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<u8, String> {
    let args = Args::parse();
    if args.list {
        args.parts()
            .flat_map(|p| p.items(&args).into_iter().map(|i| (p.name, i)))
            .for_each(|(p, i)| println!("{p}/{i}"));
        return Ok(0);
    }
    if let Some((item, result)) = args.item() {
        return alone(&args, item).write(result).map(|()| 0);
    }
    if let Some(status) = libraries::in_surroundings(goldens::unpack)? {
        return Ok(status);
    }
    if let Some((capability, driver)) = args.precompile {
        return precompile(&args, capability, driver).map(|()| 0);
    }
    #[cfg(feature = "wgpu")]
    if args.device == "wgpu" {
        weftgrad::Wgpu::adapters().first().into_iter().for_each(|adapter| println!("adapter: {adapter}"));
    }
    let report = supervise::run(&args);
    report.summary();
    Ok(u8::from(!report.passed()))
}

/// Compiles the kernels of all items for a GPU of another machine.
#[cfg(feature = "emulate")]
fn precompile(args: &Args, capability: u32, driver: u32) -> Result<(), String> {
    let count = emulated_gpu::precompile(capability, driver, |listing| plan::kernels(listing, args));
    println!("{} kernels for sm_{capability} and drivers of CUDA {driver}", count.map_err(|e| e.to_string())?);
    Ok(())
}

#[cfg(not(feature = "emulate"))]
fn precompile(_: &Args, _: u32, _: u32) -> Result<(), String> {
    Err("--precompile needs a program that was built with the feature `emulate`".into())
}

/// Runs one item in this process. An item that could not be run is a failure.
fn alone(args: &Args, name: &str) -> Found {
    let (part, item) = name.split_once('/').unwrap_or((name, ""));
    plan::run(args, part, item).unwrap_or_else(|why| Found::checks(1, vec![why]))
}
