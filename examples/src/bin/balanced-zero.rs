//! Balancing over ZeRO stage 3: ranks of different speeds take shares of each batch that they compute in the same time,
//! and every parameter lies in shards on all of them. The losses are those of one rank.
#![forbid(unsafe_code)]

use weftgrad::{
    adaptive::balance::SpeedShares,
    distributed::{
        comm::{Comm, Communicator},
        train::TrainStep,
        zero::ZeroStage,
    },
    prelude::*,
};
use weftgrad_examples::{Outcome, small};

/// Seconds that each rank takes for a row. A real rank would measure its passes, without the time that it waits.
const SECONDS: [f64; 4] = [1.0, 1.0, 2.0, 4.0];

fn main() -> Outcome<()> {
    let (sizes, balanced) = small::on_ranks(SECONDS.len(), train)?;
    println!("rows of ranks that take {SECONDS:?} seconds for one: {sizes:?}");
    if sizes != [6, 6, 3, 1] {
        return Err(format!("{sizes:?} are no shares by speed").into());
    }
    small::compare("balanced ZeRO-3", &balanced, &small::on_ranks(1, train)?.1)
}

/// Trains; returns the last shares, and the losses.
fn train(comm: Comm<Cpu>) -> Result<(Vec<usize>, Vec<f64>)> {
    let model = small::decoder(&comm, 0)?;
    let builder = TrainStep::builder(&comm, &model).optimizer(small::adamw(3e-3)).max_norm(1.0);
    let mut step = builder.zero(ZeroStage::Parameters).build()?;
    let mut shares = SpeedShares::new(comm.size())?;
    let mut losses = Vec::new();
    for k in 0..20 {
        let sizes = shares.sizes(small::ROWS);
        let (first, own) = (sizes[..comm.rank()].iter().sum::<usize>(), sizes[comm.rank()]);
        let rows = small::batch(&comm, k, first..first + own)?;
        losses.push(step.step(|_| small::loss(&model, rows.clone()))?.loss()?);
        // Every rank hears all times, so all make the same shares.
        shares.exchange(step.ranks(), SECONDS[comm.rank()] * own as f64, own)?;
    }
    Ok((shares.sizes(small::ROWS), losses))
}
