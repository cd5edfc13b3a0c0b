//! Data-parallel training: every rank has the whole model, and gradients are summed while the sweep goes on.

use std::{collections::HashMap, sync::Arc};

use autograd::{Leaf, backward_with_hooks};
use nn::{Module, ModuleExt};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps, cat},
};
use optim::{LossScaler, Norm, Optimizer, clip_grad_norm};

use super::{Loss, TrainingConfig, TrainingMetrics};
use crate::{
    buckets::{BucketOptions, Buckets},
    comm::{Collectives, Comm, ReduceOp},
    ddp::{Ddp, memory},
};

/// Trains a model of which every rank has a copy: forward, a sweep that sends gradients bucket by bucket, clipping, the optimizer.
///
/// Parameters and buffers are those of rank 0 from the start. After the first step buckets are rebuilt, once, in the order in which
/// gradients became final on rank 0.
pub struct BucketedTrainer<R: Runtime> {
    comm: Comm<R>,
    config: TrainingConfig,
    optimizer: Box<dyn Optimizer<R>>,
    buckets: Buckets<R>,
    options: BucketOptions,
    scaler: Option<LossScaler>,
    leaves: Vec<Arc<Leaf<R>>>,
    /// How many steps were begun, until buckets were rebuilt.
    begun: u8,
    steps: u64,
}

impl<R: Runtime> BucketedTrainer<R> {
    /// Trains with AdamW as `config` says.
    pub fn new(
        comm: &Comm<R>,
        model: &(impl Module<R> + ?Sized),
        config: TrainingConfig,
        options: BucketOptions,
    ) -> Result<Self> {
        let optimizer = config.adamw(leaves(model))?;
        Self::with(comm, model, optimizer, config, options)
    }

    /// Trains with any optimizer of the model's parameters; `config`'s learning rate and decay are not looked at.
    pub fn with(
        comm: &Comm<R>,
        model: &(impl Module<R> + ?Sized),
        mut optimizer: Box<dyn Optimizer<R>>,
        config: TrainingConfig,
        options: BucketOptions,
    ) -> Result<Self> {
        config.check()?;
        let ddp = Ddp::new(comm, model)?;
        let rules = format!("{options:?} {config:?} {:?}", optimizer.lrs());
        comm.agree("the training configuration", rules.as_bytes())?;
        ddp.sync_params()?;
        ddp.sync_buffers()?;
        let leaves = leaves(model);
        // Gradients usually become final from the last layer to the first.
        let order: HashMap<usize, usize> = leaves.iter().rev().enumerate().map(|(k, l)| (l.id(), k)).collect();
        let buckets = Buckets::new(comm, &mut *optimizer, &|l| place(&order, l), options.clone())?;
        let (comm, scaler) = (comm.clone(), config.loss_scaling.clone());
        Ok(BucketedTrainer { comm, config, optimizer, buckets, options, scaler, leaves, begun: 0, steps: 0 })
    }

    /// One step: `micro_batch(k)` computes the loss of the `k`-th of this rank's [`accumulation`](TrainingConfig::accumulation)
    /// micro-batches. The update is that of one rank with all examples of all ranks.
    pub fn step(&mut self, micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<TrainingMetrics<R>> {
        let done = self.accumulate(micro_batch).and_then(|losses| self.update(losses));
        self.told(done)
    }

    /// Takes part in a step of the others when this rank has no examples left.
    pub fn idle(&mut self) -> Result<TrainingMetrics<R>> {
        if self.options.unused == crate::buckets::Unused::Error {
            let why = "a rank without examples has no gradients: allow unused parameters (`Unused::Allow`)";
            return Err(Error::argument("BucketedTrainer::idle", why));
        }
        let begun = self.rebuild().map(|()| {
            self.buckets.zero();
            self.buckets.begin(true);
        });
        let done = begun.and_then(|()| self.update(Vec::new()));
        self.told(done)
    }

    /// Whether any rank has examples left; this one has if `own`. Blocks.
    pub fn any_left(&self, own: bool) -> Result<bool> {
        Ok(self.comm.exchange(&[own.into()])?.iter().any(|flag| flag == &[1]))
    }

    /// Steps through this rank's batches until every rank has run out of its own, one micro-batch a step.
    pub fn run<B>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        mut loss: impl FnMut(&B) -> Result<Loss<R>>,
        mut see: impl FnMut(TrainingMetrics<R>) -> Result<()>,
    ) -> Result<()> {
        let mut batches = batches.into_iter();
        loop {
            let batch = batches.next();
            if !self.any_left(batch.is_some())? {
                return Ok(());
            }
            let metrics = match &batch {
                Some(batch) => self.step(|_| loss(batch)),
                None => self.idle(),
            };
            see(metrics?)?;
        }
    }

    /// Updates so far.
    pub fn global_step(&self) -> u64 {
        self.steps
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &dyn Optimizer<R> {
        &*self.optimizer
    }

    /// The optimizer, for schedules and checkpoints.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer<R> {
        &mut *self.optimizer
    }

    /// The buckets.
    pub fn buckets(&self) -> &Buckets<R> {
        &self.buckets
    }

    /// The loss scaler, if there is one.
    pub fn scaler(&mut self) -> Option<&mut LossScaler> {
        self.scaler.as_mut()
    }

    /// A rank that fails lets the others know.
    fn told<T>(&self, done: Result<T>) -> Result<T> {
        done.inspect_err(|e| self.comm.abort(&e.to_string())).map_err(|e| e.on_rank(self.comm.rank()))
    }

    fn accumulate(&mut self, mut micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<Vec<Loss<R>>> {
        self.rebuild()?;
        self.buckets.zero();
        let mut losses = Vec::with_capacity(self.config.accumulation);
        for k in 0..self.config.accumulation {
            let loss = micro_batch(k)?;
            self.buckets.begin(k + 1 == self.config.accumulation);
            let scaled = self.scaler.as_ref().map(|s| s.scale(&loss.sum)).transpose()?;
            backward_with_hooks(scaled.as_ref().unwrap_or(&loss.sum), &mut self.buckets)?;
            losses.push(Loss { sum: loss.sum.detach(), weight: loss.weight });
        }
        Ok(losses)
    }

    fn update(&mut self, losses: Vec<Loss<R>>) -> Result<TrainingMetrics<R>> {
        self.buckets.finish()?;
        let totals = self.totals(&losses)?;
        let (sum, weight) = (totals.narrow(0, 0, 1)?.reshape([])?, totals.narrow(0, 1, 1)?.reshape([])?);
        let gradients = self.buckets.gradients_mut();
        // Ranks see the same sums, so they come to the same decision without asking.
        let stepped = self.scaler.as_mut().map_or(Ok(true), |s| s.unscale(gradients))?;
        gradients.multiply_by(weight.recip()?)?;
        let grad_norm = self.config.max_norm.map(|max| clip_grad_norm(gradients, max, Norm::L2)).transpose()?;
        let learning_rate = self.optimizer.lrs().first().copied().unwrap_or(0.0);
        match &mut self.scaler {
            Some(scaler) => drop(scaler.step(&mut *self.optimizer, self.buckets.gradients_mut())?),
            None => self.optimizer.step(self.buckets.gradients())?,
        }
        self.steps += u64::from(stepped);
        let loss = sum.div(&weight)?;
        Ok(TrainingMetrics { loss, grad_norm, stepped, learning_rate, global_step: self.steps })
    }

    /// Sum and weight of all micro-batches of all ranks, on the device.
    fn totals(&self, losses: &[Loss<R>]) -> Result<Tensor<R>> {
        let dtype = self.leaves.first().map_or(DType::F32, |l| l.spec().dtype);
        let dtype = if dtype == DType::F64 { dtype } else { DType::F32 };
        let rt = self.comm.runtime();
        let sums = losses.iter().map(|l| l.sum.value()?.to_dtype(dtype)?.reshape([1])).collect::<Result<Vec<_>>>()?;
        let sum = match sums.is_empty() {
            true => Tensor::zeros(rt, [1], dtype)?,
            false => cat(&sums.iter().collect::<Vec<_>>(), 0)?.sum(&[], true)?,
        };
        let weight = Tensor::full(rt, [1], dtype, losses.iter().map(|l| l.weight).sum::<f64>())?;
        self.comm.all_reduce(memory(&cat(&[&sum, &weight], 0)?)?, ReduceOp::Sum)?.wait()?.freeze()
    }

    /// Before the second step: buckets in the order in which gradients became final on rank 0.
    fn rebuild(&mut self) -> Result<()> {
        self.begun = self.begun.saturating_add(1);
        if self.begun != 2 || self.comm.size() == 1 {
            return Ok(());
        }
        let seen = self.buckets.ready_order().join("\n");
        let first = self.comm.exchange(if self.comm.rank() == 0 { seen.as_bytes() } else { &[] })?.swap_remove(0);
        let first = String::from_utf8_lossy(&first).into_owned();
        let by_name: HashMap<&str, usize> = first.lines().enumerate().map(|(k, name)| (name, k)).collect();
        // What rank 0 did not use comes last, in the order it had.
        let rest = |l: &Arc<Leaf<R>>| self.leaves.iter().rev().position(|o| o.id() == l.id()).unwrap_or(0);
        let key = |l: &Arc<Leaf<R>>| by_name.get(&*l.name()).copied().unwrap_or(by_name.len() + rest(l));
        let keys: HashMap<usize, usize> = self.leaves.iter().map(|l| (l.id(), key(l))).collect();
        self.buckets = Buckets::new(&self.comm, &mut *self.optimizer, &|l| place(&keys, l), self.options.clone())?;
        Ok(())
    }
}

fn leaves<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<Arc<Leaf<R>>> {
    model.parameters().iter().map(|p| p.leaf()).collect()
}

fn place<R: Runtime>(order: &HashMap<usize, usize>, leaf: &Arc<Leaf<R>>) -> usize {
    order.get(&leaf.id()).copied().unwrap_or(usize::MAX)
}
