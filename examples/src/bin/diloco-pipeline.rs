//! DiLoCo over pipelines: two pipelines of two ranks train by themselves, and meet after every fifth step. They take
//! the steps of two ranks that each have the whole model.
#![forbid(unsafe_code)]

use weftgrad::{
    adaptive::local_updates::{DiLoCo, LocalSteps, LocalUpdates},
    distributed::{
        comm::{Comm, NoOpCommunicator},
        mesh::Mesh,
        plan::{Axis, ParallelPlan},
        train::{Step, TrainStep},
    },
    models::Decoder,
    prelude::*,
};
use weftgrad_examples::{Outcome, small};

const STEPS: usize = 20;
const MICRO_BATCHES: usize = 4;

fn main() -> Outcome<()> {
    let pipelines = small::on_ranks(4, in_pipelines)?;
    small::compare("DiLoCo over pipelines", &pipelines, &small::on_ranks(2, whole)?)
}

fn in_pipelines(comm: Comm<Cpu>) -> Result<Vec<f64>> {
    let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Pipe, 2), (Axis::Data, 2)])?)?;
    // To its step, a pipeline is alone in the world.
    let pipeline = Mesh::new(mesh.axis(Axis::Pipe), ParallelPlan::of([(Axis::Pipe, 2)])?)?;
    let plan = Decoder::<Cpu>::tensor_plan();
    let stages = small::stages(&pipeline, small::decoder(&comm, 0)?, &plan, MICRO_BATCHES)?;
    let step = TrainStep::builder(&pipeline, stages).optimizer(small::adamw(3e-3)).max_norm(1.0).build()?;
    // The stages are in the step, so no other model has parameters to synchronize.
    let mut step = meeting(mesh.axis(Axis::Data), &None::<Decoder<Cpu>>, step)?.among(&comm);
    let own = small::share(mesh.batch());
    let mut loss = |k| step.step(|_| small::micro_batches(&comm, k, own.clone(), MICRO_BATCHES))?.loss();
    (0..STEPS).map(&mut loss).collect()
}

fn whole(comm: Comm<Cpu>) -> Result<Vec<f64>> {
    let model = small::decoder(&comm, 0)?;
    let alone = NoOpCommunicator::new(comm.runtime());
    let step = TrainStep::builder(&alone, &model).optimizer(small::adamw(3e-3)).max_norm(1.0).build()?;
    let mut step = meeting(&comm, &model, step)?;
    let own = small::share(&comm);
    let mut loss = |k| step.step(|_| small::loss(&model, small::batch(&comm, k, own.clone())?))?.loss();
    (0..STEPS).map(&mut loss).collect()
}

/// A step of one replica, which the others meet after every fifth.
fn meeting<S: Step<Cpu>>(replicas: &Comm<Cpu>, model: &impl Module<Cpu>, step: S) -> Result<LocalSteps<Cpu, S>> {
    let every = LocalUpdates { every: Some(5), ..Default::default() };
    LocalSteps::new(replicas, model, step, DiLoCo::default(), every)
}
