//! What the tests share: a model, data, a sink that remembers, and every way to take a step.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::PathBuf;

use data::Array;
use distributed::{buckets::BucketOptions, comm::NoOpCommunicator};
use nn::Dropout;
use numcore::Tensor;
use optim::AdamWConfig;
use train::RunReport;

use crate::prelude::*;

/// World sizes of every comparison.
pub const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];

pub fn cpu(_: usize) -> Result<Cpu> {
    Ok(Cpu::with_threads(1))
}

/// Two layers, with dropout between them: random state counts.
#[derive(Module)]
#[module(crate = "::nn")]
pub struct Mlp<R: Runtime> {
    pub a: Linear<R>,
    pub drop: Dropout,
    pub b: Linear<R>,
}

impl<R: Runtime> Mlp<R> {
    pub fn new(rt: &R, dropout: f64) -> Result<Self> {
        let init = Init::new(rt, 5).dtype(DType::F64);
        Ok(Mlp { a: Linear::new(&init, 3, 8)?, drop: Dropout::new(dropout)?, b: Linear::new(&init, 8, 1)? })
    }
}

impl<R: Runtime> Forward<R> for Mlp<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.b.forward(&self.drop.forward(&self.a.forward(x)?.tanh()?)?)
    }
}

/// A batch: rows of three inputs and a target.
pub type Rows = Tensor<Cpu>;

/// A dataset of such rows.
pub fn dataset(rows: Vec<[f64; 4]>) -> data::Rows {
    data::Rows::new(Array::new([rows.len(), 4], rows.concat()).unwrap()).unwrap()
}

/// `n` examples, which differ.
pub fn examples(n: usize) -> Vec<[f64; 4]> {
    let wave = |i: usize, k: usize| ((i * 7 + k * 3) as f64 * 0.37).sin();
    (0..n).map(|i| [wave(i, 0), wave(i, 1), wave(i, 2), wave(i, 0) * wave(i, 1) + 0.3 * wave(i, 2)]).collect()
}

/// Batches of 8 of 37 examples, in another order in each epoch: 5 steps in an epoch, of which the last is short.
pub fn loader(rt: &Cpu) -> Loader<Rows> {
    Loader::new(dataset(examples(37))).batch(8).shuffle(3).workers(1).stack().on(rt)
}

/// Batches of 6 of 23 other examples.
pub fn held_out(rt: &Cpu) -> Loader<Rows> {
    let all = examples(60).split_off(37);
    Loader::new(dataset(all)).batch(6).workers(0).stack().on(rt)
}

/// Squared errors of a batch, summed.
pub fn loss(model: &Mlp<Cpu>, batch: &Batch<Rows>) -> Result<Loss<Cpu>> {
    let x = Var::new(batch.data.narrow(1, 0, 3)?.contiguous()?);
    let y = Var::new(batch.data.narrow(1, 3, 1)?.contiguous()?);
    let sum = model.forward(&x)?.sub(&y)?.square()?.sum_all()?;
    Loss::sum(sum, batch.rows as f64)
}

pub fn adamw() -> AdamWConfig {
    AdamWConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() }
}

pub fn ddp(comm: &Comm<Cpu>, model: &Mlp<Cpu>, accumulation: usize) -> Result<TrainStep<Cpu>> {
    let config = TrainingConfig { accumulation, max_norm: Some(0.5), ..Default::default() };
    TrainStep::builder(comm, model).optimizer(adamw()).config(config).build()
}

/// Data parallelism whose sums are those of one rank.
pub fn canonical(comm: &Comm<Cpu>, model: &Mlp<Cpu>, accumulation: usize) -> Result<TrainStep<Cpu>> {
    let options = BucketOptions { canonical: true, ..Default::default() };
    TrainStep::builder(comm, model).optimizer(adamw()).buckets(options).accumulation(accumulation).build()
}

pub fn zero(comm: &Comm<Cpu>, model: &Mlp<Cpu>, stage: ZeroStage, accumulation: usize) -> Result<TrainStep<Cpu>> {
    let config = TrainingConfig { accumulation, max_norm: Some(0.5), ..Default::default() };
    let options = ZeroOptions { stage, units: UnitOf::children(), ..Default::default() };
    TrainStep::builder(comm, model).optimizer(adamw()).config(config).zero(options).build()
}

pub fn one() -> Comm<Cpu> {
    Arc::new(NoOpCommunicator::new(&Cpu::with_threads(1)))
}

/// Runs a program on so many ranks: what rank 0 returns.
pub fn on_ranks<T: Send>(ranks: usize, program: impl Fn(&Comm<Cpu>) -> Result<T> + Sync) -> Result<T> {
    Ok(Ranks::new(ranks).run(cpu, |comm| program(&comm))?.swap_remove(0))
}

/// Remembers what it is given.
#[derive(Clone, Debug, Default)]
pub struct Memory(pub Arc<Mutex<Vec<Record>>>);

impl Sink for Memory {
    fn write(&mut self, record: &Record) -> Result<()> {
        self.0.lock().unwrap().push(record.clone());
        Ok(())
    }
}

impl Memory {
    /// Steps and values of a name.
    pub fn of(&self, name: &str) -> Vec<(u64, f64)> {
        let value = |record: &Record| match record.values.iter().find(|(known, _)| known == name)? {
            (_, Value::Scalar(value)) => Some((record.step, *value)),
            _ => None,
        };
        self.0.lock().unwrap().iter().filter_map(value).collect()
    }

    pub fn text(&self, name: &str) -> Option<String> {
        self.0.lock().unwrap().iter().flat_map(|record| record.values.clone()).find_map(|(known, value)| match value {
            Value::Text(text) if known == name => Some(text),
            _ => None,
        })
    }
}

/// Equal to the bit, NaN included.
#[track_caller]
pub fn assert_same(a: &[(u64, f64)], b: &[(u64, f64)], what: &str) {
    let bits = |all: &[(u64, f64)]| all.iter().map(|(step, x)| (*step, x.to_bits())).collect::<Vec<_>>();
    assert_eq!(bits(a), bits(b), "{what}: {a:?} {b:?}");
}

/// All parameters, one after another.
pub fn weights(model: &Mlp<Cpu>) -> Result<Vec<f64>> {
    Ok(model.parameters().iter().map(|p| p.value()?.to_vec::<f64>()).collect::<Result<Vec<_>>>()?.concat())
}

/// A folder that is removed when the test ends.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("weftgrad-train-{name}-{}-{call}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The trainer of most tests.
pub type Tested<'a> = Trainer<'a, Cpu, Mlp<Cpu>, TrainStep<Cpu>, Rows>;
pub type Report = RunReport<TrainStep<Cpu>>;
