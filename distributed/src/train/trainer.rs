//! One training step, on however many ranks.

use std::sync::LazyLock;

use autograd::backward_with_hooks;
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps, cat},
    pointwise::Program,
};
use optim::LossScaler;

use super::{Loss, Strategy, TrainingConfig, TrainingMetrics};
use crate::{
    comm::{Collectives, ReduceOp},
    ddp::memory,
};

/// Trains a model: forward and backward of some micro-batches, clipping, the update. How it is spread over ranks is the strategy's;
/// the result is that of one rank with all examples of all ranks.
pub struct Trainer<R: Runtime, S: Strategy<R>> {
    config: TrainingConfig,
    pub(super) scaler: Option<LossScaler>,
    pub(super) strategy: S,
    pub(super) steps: u64,
    runtime: std::marker::PhantomData<R>,
}

/// `min(1, max / (‖g·s‖ + 1e-6)) · s`, as `clip_grad_norm` has it, for a positive factor `s` that the gradients still have to be multiplied by.
static CLIPPED: LazyLock<Program> =
    LazyLock::new(|| Program::new("clipped", |[norm, scale], [max]| [(max / (norm * scale + 1e-6)).min(1.0) * scale]));

/// The same sweep, adding nothing.
fn weightless<R: Runtime>(loss: Loss<R>) -> Result<Loss<R>> {
    Ok(Loss { sum: loss.sum.mul(0.0)?, weight: 0.0 })
}

impl<R: Runtime, S: Strategy<R>> Trainer<R, S> {
    /// A trainer with this strategy; `config`'s learning rate and decay are not looked at.
    pub fn over(strategy: S, config: TrainingConfig) -> Result<Self> {
        config.check()?;
        strategy.comm().agree("the training configuration", format!("{config:?}").as_bytes())?;
        let scaler = config.loss_scaling.clone();
        Ok(Trainer { config, scaler, strategy, steps: 0, runtime: std::marker::PhantomData })
    }

    /// One step: `micro_batch(k)` computes the loss of the `k`-th of this rank's [`accumulation`](TrainingConfig::accumulation)
    /// micro-batches.
    pub fn step(&mut self, micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<TrainingMetrics<R>> {
        let done = self.accumulate(micro_batch).and_then(|losses| self.update(&losses));
        self.told(done)
    }

    /// Takes part in a step of the others when this rank has no examples left.
    pub fn idle(&mut self) -> Result<TrainingMetrics<R>> {
        if !self.strategy.may_idle() {
            let why = "this strategy needs a sweep on every rank: compute any batch with a weight of 0, as `run` does, or, \
                       where parameters are not sharded, allow unused ones (`Unused::Allow`)";
            return self.told(Err(Error::argument("Trainer::idle", why)));
        }
        let scale = self.scaler.as_ref().map(LossScaler::factor);
        let begun = self.strategy.prepare().and_then(|()| self.strategy.begin(true));
        let done = begun.and_then(|()| self.strategy.weigh(0.0, scale)).and_then(|()| self.update(&[]));
        self.told(done)
    }

    /// Whether any rank has examples left; this one has if `own`. Blocks.
    pub fn any_left(&self, own: bool) -> Result<bool> {
        Ok(self.strategy.comm().exchange(&[own.into()])?.iter().any(|flag| flag == &[1]))
    }

    /// Steps through this rank's batches, one micro-batch a step, until every rank has run out of its own. A rank that has run out takes
    /// part without examples; where that cannot be (parameters are gathered as the model reads them, or each needs a gradient) it
    /// computes its last batch again, which then weighs nothing.
    pub fn run<B>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        mut loss: impl FnMut(&B) -> Result<Loss<R>>,
        mut see: impl FnMut(TrainingMetrics<R>) -> Result<()>,
    ) -> Result<()> {
        let (mut batches, mut last) = (batches.into_iter(), None);
        loop {
            let batch = batches.next();
            if !self.any_left(batch.is_some())? {
                return Ok(());
            }
            let left = batch.is_some();
            last = batch.or(last);
            let metrics = match &last {
                Some(batch) if left => self.step(|_| loss(batch)),
                Some(batch) if !self.strategy.may_idle() => self.step(|_| weightless(loss(batch)?)),
                _ => self.idle(),
            };
            see(metrics?)?;
        }
    }

    /// Updates so far.
    pub fn global_step(&self) -> u64 {
        self.steps
    }

    /// The strategy, with optimizer and gradients.
    pub fn strategy(&self) -> &S {
        &self.strategy
    }

    /// The strategy, for schedules and checkpoints.
    pub fn strategy_mut(&mut self) -> &mut S {
        &mut self.strategy
    }

    /// The loss scaler, if there is one.
    pub fn scaler(&mut self) -> Option<&mut LossScaler> {
        self.scaler.as_mut()
    }

    /// A rank that fails lets the others know.
    fn told<T>(&self, done: Result<T>) -> Result<T> {
        let comm = self.strategy.comm();
        done.inspect_err(|e| comm.abort(&e.to_string())).map_err(|e| e.on_rank(comm.rank()))
    }

    fn accumulate(&mut self, mut micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<Vec<Loss<R>>> {
        self.strategy.prepare()?;
        let mut losses = Vec::with_capacity(self.config.accumulation);
        for k in 0..self.config.accumulation {
            let loss = micro_batch(k)?;
            let last = k + 1 == self.config.accumulation;
            self.strategy.begin(last)?;
            if last {
                let weight = losses.iter().map(|l: &Loss<R>| l.weight).sum::<f64>() + loss.weight;
                self.strategy.weigh(weight, self.scaler.as_ref().map(LossScaler::factor))?;
            }
            let scaled = self.scaler.as_ref().map(|s| s.scale(&loss.sum)).transpose()?;
            backward_with_hooks(scaled.as_ref().unwrap_or(&loss.sum), &mut self.strategy)?;
            losses.push(Loss { sum: loss.sum.detach(), weight: loss.weight });
        }
        Ok(losses)
    }

    fn update(&mut self, losses: &[Loss<R>]) -> Result<TrainingMetrics<R>> {
        self.strategy.finish()?;
        let totals = self.totals(losses)?;
        let (sum, weight) = (totals.narrow(0, 0, 1)?.reshape([])?, totals.narrow(0, 1, 1)?.reshape([])?);
        let stepped = self.scaler.is_none() || self.strategy.is_finite()?;
        let factor = self.scaler.as_ref().map_or(1.0, LossScaler::factor);
        let mut scale = weight.mul(factor)?.recip()?;
        let mut grad_norm = None;
        if let Some(max) = self.config.max_norm {
            let norm = self.strategy.norm()?.to_dtype(scale.dtype())?;
            grad_norm = Some(norm.mul(&scale)?);
            scale = norm.apply_program(&CLIPPED, &[&scale], &[max.into()])?;
        }
        let learning_rate = self.strategy.learning_rate();
        if stepped {
            self.strategy.update(&scale)?;
            self.steps += 1;
        }
        if let Some(scaler) = &mut self.scaler {
            scaler.adapt(stepped);
        }
        Ok(TrainingMetrics { loss: sum.div(&weight)?, grad_norm, stepped, learning_rate, global_step: self.steps })
    }

    /// Sum and weight of all micro-batches of all ranks, on the device.
    fn totals(&self, losses: &[Loss<R>]) -> Result<Tensor<R>> {
        let comm = self.strategy.comm();
        let wide = comm.runtime().capabilities().compute.contains(&DType::F64);
        let dtype = if wide { DType::F64 } else { DType::F32 };
        let sums = losses.iter().map(|l| l.sum.value()?.to_dtype(dtype)?.reshape([1])).collect::<Result<Vec<_>>>()?;
        let sum = match sums.is_empty() {
            true => Tensor::zeros(comm.runtime(), [1], dtype)?,
            false => cat(&sums.iter().collect::<Vec<_>>(), 0)?.sum(&[], true)?,
        };
        let weight = Tensor::full(comm.runtime(), [1], dtype, losses.iter().map(|l| l.weight).sum::<f64>())?;
        comm.all_reduce(memory(&cat(&[&sum, &weight], 0)?)?, ReduceOp::Sum)?.wait()?.freeze()
    }
}
