//! Many ranks against one, in one run: the throughput of an all-reduce, and the cost of a training step with each
//! strategy.
//!
//! `ranks [ROUNDS] [--link LATENCY_US,GB_PER_S]`: rounds alternate between the cases. The median is printed, with its
//! ratio to one rank of one thread that computes as much per rank. A loss that is not that of one rank is an error.
//!
//! With `--link`, ranks have its latency and bandwidth. Each strategy is then shown bucket by bucket or unit by unit,
//! and also with a single bucket or unit, which overlaps little communication. With `--processes`, ranks that are
//! processes are shown next to threads, over TCP under `weftgrad-run -n 2`. A build with the feature `mpi`, under
//! `mpirun -n 2`, shows them over MPI too.
#![forbid(unsafe_code)]

mod links;
mod processes;
mod training;

use std::{num::NonZero, process::ExitCode, time::Instant};

use clap::Parser;
use training::{BUCKETS, Case, Way, rounds};
use weftgrad::{
    distributed::{
        comm::{Collectives, Communicator, Link, Ranks, ReduceOp},
        zero::{UnitOf, ZeroStage},
    },
    prelude::*,
};

const ALL_REDUCE: usize = 64 << 20;

/// The largest difference of the losses of cases with equal batches: all compute the same steps in `f32`.
const APART: f64 = 1e-3;

const CASES: [Case; 10] = [
    Case::one("1 rank × 1 thread", 1),
    Case::one("1 rank × 2 threads", 2),
    Case::two("ddp, 2 ranks", BUCKETS),
    Case::two("zero 1, 2 ranks", Way::Zero(ZeroStage::Optimizer, UnitOf::layers)),
    Case::two("zero 2, 2 ranks", Way::Zero(ZeroStage::Gradients, UnitOf::layers)),
    Case::two("zero 3, 2 ranks", Way::Zero(ZeroStage::Parameters, UnitOf::layers)),
    Case::two("tensor, 2 ranks", Way::Tensor { sequence: false, pieces: 1 }),
    Case::two("sequence, 2 ranks", Way::Tensor { sequence: true, pieces: 1 }),
    Case::two("in 2 pieces", Way::Tensor { sequence: true, pieces: 2 }),
    Case::two("in 4 pieces", Way::Tensor { sequence: true, pieces: 4 }),
];

/// Times many ranks against one.
#[derive(Parser)]
struct Options {
    /// Rounds, of which the median counts.
    #[arg(default_value = "5")]
    rounds: NonZero<usize>,
    /// The latency in microseconds and the bandwidth in GB/s of a link between ranks, as in `50,0.125`.
    #[arg(long, value_parser = links::parse)]
    link: Option<Link>,
    /// Ranks that are processes, under `weftgrad-run -n 2`, or `mpirun -n 2` in a build with MPI.
    #[arg(long, conflicts_with = "link")]
    processes: bool,
    /// Processes without training: all-reduces alone.
    #[arg(long, requires = "processes")]
    collectives: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let rounds = options.rounds.get();
    println!("{}", Cpu::new().capabilities().name);
    let done = match options.link {
        Some(link) => links::run(rounds, link),
        None if options.processes => processes::run(rounds, !options.collectives),
        None => run(rounds),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ranks: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(n: usize) -> Result<()> {
    let mut moved: Vec<f64> = (0..n).map(|_| all_reduce()).collect::<Result<_>>()?;
    moved.sort_by(f64::total_cmp);
    println!("all-reduce of 64 MiB between two threads: {:.1} GB/s (median of {n})\n", moved[n / 2] / 1e9);
    let all = rounds(&CASES, n, None)?;
    println!("{:20} {:>12} {:>14} {:>12} {:>12} {:>9}", "", "ms a step", "per rank", "exposed ms", "peak MiB", "loss");
    for (case, measured) in CASES.iter().zip(&all).skip(2) {
        let (loss, alone) = (measured[n / 2].loss, all[1][n / 2].loss);
        if (loss - alone).abs() > APART * alone {
            let why = format!("{} has the loss {loss}, one rank with the same batch {alone}", case.name);
            return Err(weftgrad::Error::argument("ranks", why));
        }
    }
    let one = CASES[0].rate(all[0][n / 2].step);
    for (case, measured) in CASES.iter().zip(&all) {
        let m = &measured[n / 2];
        let (exposed, peak) = (m.exposed.as_secs_f64() * 1e3, m.peak as f64 / f64::from(1 << 20));
        let (step, ratio) = (m.step.as_secs_f64() * 1e3, format!("{:.3}×", case.rate(m.step) / one));
        println!("{:20} {step:>12.1} {ratio:>14} {exposed:>12.1} {peak:>12.1} {:>9.4}", case.name, m.loss);
    }
    Ok(())
}

/// The throughput of an all-reduce in bytes a second, counted once.
fn all_reduce() -> Result<f64> {
    let rates = Ranks::new(2).run(
        |_| Ok(Cpu::with_threads(1)),
        |comm| {
            let ones = Tensor::ones(comm.runtime(), [ALL_REDUCE / 4], DType::F32)?;
            let mut x = ones.copy()?.try_mut().map_err(|_| weftgrad::Error::argument("ranks", "a copy is shared"))?;
            for _ in 0..2 {
                x = comm.all_reduce(x, ReduceOp::Max)?.wait()?;
            }
            let begun = Instant::now();
            for _ in 0..5 {
                x = comm.all_reduce(x, ReduceOp::Max)?.wait()?;
            }
            Ok(5.0 * ALL_REDUCE as f64 / begun.elapsed().as_secs_f64())
        },
    )?;
    Ok(rates.into_iter().fold(f64::INFINITY, f64::min))
}
