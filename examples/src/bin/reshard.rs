//! Saves a checkpoint with four ranks and sharded parameters, and loads it with two ranks and unsharded ones. Training
//! continues as if nothing had happened.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use weftgrad::{
    AnyRuntime, Launcher,
    distributed::{
        checkpoint::Folder,
        comm::{Comm, Communicator},
        sampler::shard_batches,
        train::{CheckpointNotes, Loss, TrainStep},
        zero::ZeroStage,
    },
    fused::Reduction,
    nn::{Init, Linear},
    optim::{AdamWConfig, ParamGroups},
    prelude::*,
};
use weftgrad_examples::{
    Outcome,
    options::{self, On, positive},
};

/// Save on some ranks, load on others.
#[derive(Debug, Parser)]
#[command(name = "reshard", version)]
struct Options {
    /// Ranks that save, with everything sharded.
    #[arg(long, default_value = "4", value_parser = positive)]
    from: usize,
    /// Ranks that load, each with the unsharded model.
    #[arg(long, default_value = "2", value_parser = positive)]
    to: usize,
    /// Folder of the checkpoints.
    #[arg(long, default_value = "reshard-out", value_name = "DIR")]
    out: std::path::PathBuf,
    #[command(flatten)]
    on: On,
}

type Model = Vec<Linear<AnyRuntime>>;

/// Steps before the checkpoint, and after it.
const STEPS: usize = 5;
const EXAMPLES: usize = 12;

fn main() -> ExitCode {
    options::main(run)
}

fn run(options: &Options) -> Outcome<()> {
    let folder = Folder::new(&options.out);
    let ranks = |size| Launcher::threads(size).devices([options.on.device]);
    let through = ranks(options.from).run(|comm| sharded(&comm, &folder))?;
    let resumed = ranks(options.to).run(|comm| whole(&comm, &folder))?;
    println!("step   {} ranks, sharded   {} ranks, resumed", options.from, options.to);
    for (k, (a, b)) in through.iter().zip(&resumed).enumerate() {
        println!("{:4}   {a:<17.8}   {b:<.8}", STEPS + k);
    }
    match through.iter().zip(&resumed).all(|(a, b)| (a - b).abs() < 1e-4 * a.abs()) {
        true => Ok(()),
        false => Err("the losses differ by more than rounding".into()),
    }
}

fn model(comm: &Comm<AnyRuntime>, seed: u64) -> Result<Model> {
    let init = Init::new(comm.runtime(), seed);
    [(6, 32), (32, 32), (32, 3)].iter().map(|&(i, o)| Linear::new(&init, i, o)).collect()
}

fn loss(comm: &Comm<AnyRuntime>, model: &Model, step: usize) -> Result<Loss<AnyRuntime>> {
    let rt = comm.runtime();
    let own: Vec<i64> = shard_batches(EXAMPLES, comm.rank(), comm.size()).into_iter().map(|i| i as i64).collect();
    let index = Tensor::from_vec(rt, own.clone())?;
    let batch = |width, seed: usize| Tensor::normal(rt, [EXAMPLES, width], DType::F32, 0.0, 1.0, (seed + step) as u64);
    let (x, y) = (batch(6, 0)?.index_select(0, &index)?, batch(3, 1000)?.index_select(0, &index)?);
    let out = model.iter().try_fold(Var::new(x), |x, layer| layer.forward(&x)?.tanh())?;
    Loss::sum(nn::loss::mse(&out, &Var::new(y), Reduction::Sum)?, (3 * own.len()) as f64)
}

fn adamw() -> ParamGroups<AdamWConfig> {
    ParamGroups::decay_matrices(AdamWConfig::default())
}

/// Trains, saves, and trains on; returns the losses after the save.
fn sharded(comm: &Comm<AnyRuntime>, folder: &Folder) -> Result<Vec<f64>> {
    let model = model(comm, 1)?;
    let mut trainer = TrainStep::builder(comm, &model).optimizer(adamw()).zero(ZeroStage::Parameters).build()?;
    for step in 0..STEPS {
        trainer.step(|_| loss(comm, &model, step))?;
    }
    trainer.save(folder, &CheckpointNotes::from([("example".into(), "reshard".into())]))?;
    (STEPS..2 * STEPS).map(|step| trainer.step(|_| loss(comm, &model, step))?.loss()).collect()
}

/// Loads the sharded checkpoint, and trains on; returns the losses.
fn whole(comm: &Comm<AnyRuntime>, folder: &Folder) -> Result<Vec<f64>> {
    let model = model(comm, 2)?;
    let mut trainer = TrainStep::builder(comm, &model).optimizer(adamw()).build()?;
    if let Some(manifest) = trainer.load(folder)? {
        assert_eq!(manifest.notes()["example"], "reshard");
    }
    (STEPS..2 * STEPS).map(|step| trainer.step(|_| loss(comm, &model, step))?.loss()).collect()
}
