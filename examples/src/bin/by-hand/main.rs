//! Two training loops on several ranks, written by hand because no trainer fits: a GAN, and a model that grows during
//! training. Each is compared with the same loop on one rank.
#![forbid(unsafe_code)]

mod adversarial;
mod progressive;

use std::process::ExitCode;

use clap::Parser;
use weftgrad::{
    AnyRuntime,
    distributed::{
        comm::{Comm, Communicator},
        sampler::shard_batches,
    },
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, positive},
    ranks::Joined,
};

/// Train a GAN and a growing model with gradients that are averaged by hand.
#[derive(Debug, Parser)]
#[command(name = "by-hand", version)]
struct Options {
    /// Ranks.
    #[arg(long, default_value = "2", value_parser = positive)]
    ranks: usize,
    /// Steps of each.
    #[arg(long, default_value = "300", value_parser = positive)]
    steps: usize,
    #[command(flatten)]
    joined: Joined,
}

/// Examples in a step, of all ranks together.
const BATCH: usize = 64;
/// The number of steps whose losses are compared: the rounding of another order of sums grows from step to step.
const CHECKED: usize = 50;

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let ranks = options.joined.ranks(options.ranks)?;
    for (name, train) in [("adversarial", adversarial::losses as Train), ("progressive", progressive::losses)] {
        let rank = |comm: Comm<AnyRuntime>| train(&comm, options.steps);
        let many = ranks.run(rank)?;
        if !ranks.is_rank_zero() {
            continue;
        }
        let one = ranks.run_alone(rank)?;
        println!("{name}: loss {:.4} at first, {:.4} at last", many[0], many[many.len() - 1]);
        if !one.iter().zip(&many).take(CHECKED).all(|(a, b)| (a - b).abs() < 1e-3 * a.abs()) {
            return Err(format!("{name}: the losses differ from one rank's by more than rounding").into());
        }
    }
    Ok(())
}

/// A training loop on one rank: returns the loss of each step over the examples of all ranks.
type Train = fn(&Comm<AnyRuntime>, usize) -> Result<Vec<f64>>;

/// This rank's rows of a step's batch, and the number of rows of each rank.
fn share(comm: &Comm<AnyRuntime>, all: &Tensor<AnyRuntime>) -> Result<(Var<AnyRuntime>, Vec<u64>)> {
    let of = |rank| shard_batches(BATCH, rank, comm.size());
    let own: Vec<i64> = of(comm.rank()).into_iter().map(|row| row as i64).collect();
    let own = Tensor::from_slice(comm.runtime(), [own.len()], &own)?;
    Ok((Var::new(all.index_select(0, &own)?), (0..comm.size()).map(|rank| of(rank).len() as u64).collect()))
}

/// The mean over the examples of all ranks, from this rank's mean `own` over its examples.
fn mean(comm: &Comm<AnyRuntime>, own: &Var<AnyRuntime>, counts: &[u64]) -> Result<f64> {
    use weftgrad::distributed::comm::Collectives;
    let own = own.item()? * counts[comm.rank()] as f64;
    let all = comm.exchange_equal(own.to_le_bytes())?;
    Ok(all.into_iter().map(f64::from_le_bytes).sum::<f64>() / counts.iter().sum::<u64>() as f64)
}
