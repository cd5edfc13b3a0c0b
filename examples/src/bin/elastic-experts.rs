//! Elastic ranks of experts in the stages of a pipeline: two pipelines share out the experts of each stage, until one
//! pipeline is lost. The other goes on from the last commit, with all experts, as if there had been one rank all along.
#![forbid(unsafe_code)]

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use weftgrad::{
    Error,
    adaptive::elastic::{Elastic, ElasticWorld},
    distributed::{
        comm::{Comm, Communicator, Quorum, ThreadRendezvous},
        mesh::Mesh,
        plan::{Axis, ParallelPlan},
        train::TrainStep,
    },
    models::Decoder,
    prelude::*,
};
use weftgrad_examples::{Outcome, small};

const STEPS: u64 = 12;
const LOST_AT: u64 = 6;
/// The losses of all steps, whatever world took them.
type Losses = Mutex<BTreeMap<u64, f64>>;

fn main() -> Outcome<()> {
    let losses = Losses::default();
    let runtimes = (0..4).map(|_| Cpu::with_threads(1)).collect();
    let (_rendezvous, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), Duration::from_secs(60))?;
    // As many ranks as a pipeline has can be lost at once.
    let left = Elastic::on_threads(seats, |elastic| elastic.copies(2), |world| train(world, &losses));
    let left: Vec<usize> = left.into_iter().flatten().collect();
    println!("ranks at the end: {}", left.len());
    if left != [2, 2] {
        return Err(format!("the ranks that are left have worlds of {left:?}").into());
    }
    let elastic: Vec<f64> = losses.into_inner()?.into_values().collect();
    small::compare("elastic experts in stages", &elastic, &small::on_ranks(1, alone)?)
}

/// Trains in one world after another; returns the size of the last.
fn train(world: &mut ElasticWorld<Cpu>, losses: &Losses) -> Result<usize> {
    let comm = world.comm()?;
    let pipelines = comm.size() / 2;
    let axes = [(Axis::Pipe, 2), (Axis::Data, pipelines), (Axis::Expert, pipelines)];
    let mesh = Mesh::new(&comm, ParallelPlan::of(axes)?)?;
    let plan = Decoder::<Cpu>::tensor_plan();
    let stages = small::stages(&mesh, small::decoder(&comm, 4)?, &plan, 2)?;
    let mut step = TrainStep::builder(&mesh, stages).optimizer(small::adamw(3e-3)).max_norm(1.0).experts().build()?;
    world.restore(&mut step)?;
    world.commit(step.global_step(), &step, &Default::default())?;
    while step.global_step() < STEPS {
        let k = step.global_step();
        if (world.generation(), k) == (0, LOST_AT) && mesh.axis(Axis::Data).rank() == 1 {
            return Err(Error::argument("the machine", "is gone"));
        }
        let own = small::share(mesh.batch());
        let loss = step.step(|_| small::micro_batches(&comm, k as usize, own.clone(), 2))?.loss()?;
        losses.lock().map_err(|_| Error::state("the losses", "another rank panicked"))?.insert(k, loss);
        world.commit(k + 1, &step, &Default::default())?;
    }
    Ok(comm.size())
}

fn alone(comm: Comm<Cpu>) -> Result<Vec<f64>> {
    let model = small::decoder(&comm, 4)?;
    let mut step = TrainStep::builder(&comm, &model).optimizer(small::adamw(3e-3)).max_norm(1.0).build()?;
    let mut loss = |k| step.step(|_| small::loss(&model, small::batch(&comm, k, 0..small::ROWS)?))?.loss();
    (0..STEPS as usize).map(&mut loss).collect()
}
