//! One training step, on however many ranks.

use autograd::backward_with_hooks;
use numcore::{
    Error, Result, Runtime,
    ops::{Apply, PointwiseOps},
};
use optim::LossScaler;

use super::{Loss, Strategy, TrainingConfig, TrainingMetrics, Updates};
use crate::comm::{Collectives, answers, told};

/// Trains a model: forward and backward of some micro-batches, clipping, the update. How it is spread over ranks is the strategy's;
/// the result is that of one rank with all examples of all ranks.
pub struct Trainer<R: Runtime, S: Strategy<R>> {
    pub(super) updates: Updates,
    pub(super) strategy: S,
    runtime: std::marker::PhantomData<R>,
}

/// The same sweep, adding nothing.
fn weightless<R: Runtime>(loss: Loss<R>) -> Result<Loss<R>> {
    Ok(Loss { sum: loss.sum.mul(0.0)?, weight: 0.0 })
}

impl<R: Runtime, S: Strategy<R>> Trainer<R, S> {
    /// A trainer with this strategy; `config`'s learning rate and decay are not looked at.
    pub fn over(strategy: S, config: TrainingConfig) -> Result<Self> {
        config.check()?;
        strategy.comm().agree("the training configuration", format!("{config:?}").as_bytes())?;
        Ok(Trainer { updates: Updates::new(config), strategy, runtime: std::marker::PhantomData })
    }

    /// One step: `micro_batch(k)` computes the loss of the `k`-th of this rank's [`accumulation`](TrainingConfig::accumulation)
    /// micro-batches.
    pub fn step(&mut self, micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<TrainingMetrics<R>> {
        let done = self.accumulate(micro_batch).and_then(|losses| self.update(&losses));
        told(self.strategy.comm(), done)
    }

    /// Takes part in a step of the others when this rank has no examples left.
    pub fn idle(&mut self) -> Result<TrainingMetrics<R>> {
        if !self.strategy.may_idle() {
            let why = "this strategy needs a sweep on every rank: compute any batch with a weight of 0, as `run` does, or \
                       allow unused parameters (`Unused::Allow`)";
            return told(self.strategy.comm(), Err(Error::argument("Trainer::idle", why)));
        }
        let scale = self.updates.scaler.as_ref().map(LossScaler::factor);
        let begun = self.strategy.prepare().and_then(|()| self.strategy.begin(true));
        let done = begun.and_then(|()| self.strategy.weigh(0.0, scale)).and_then(|()| self.update(&[]));
        told(self.strategy.comm(), done)
    }

    /// Whether any rank has examples left; this one has if `own`. Blocks.
    pub fn any_left(&self, own: bool) -> Result<bool> {
        Ok(answers(self.strategy.comm(), own)?.contains(&true))
    }

    /// Steps through this rank's batches, one micro-batch a step, until every rank has run out of its own. A rank that has run out takes
    /// part without examples; where that cannot be (each parameter needs a gradient) it computes its last batch again, which then
    /// weighs nothing.
    ///
    /// # Errors
    /// On every rank, before the first step, if there a rank has no batch at all while others have some: it has nothing to compute again.
    pub fn run<B>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        mut loss: impl FnMut(&B) -> Result<Loss<R>>,
        mut see: impl FnMut(TrainingMetrics<R>) -> Result<()>,
    ) -> Result<()> {
        let (mut batches, mut last) = (batches.into_iter().peekable(), None);
        self.require_batches(batches.peek().is_some())?;
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

    /// An error on every rank if one can never sweep, and must.
    fn require_batches(&self, own: bool) -> Result<()> {
        let have = answers(self.strategy.comm(), own)?;
        let without: Vec<usize> = (0..have.len()).filter(|&rank| !have[rank]).collect();
        if self.strategy.may_idle() || without.is_empty() || without.len() == have.len() {
            return Ok(());
        }
        let why = format!(
            "no batch at all on rank {}, and this strategy needs a sweep on every rank: give each rank at least one (as \
             `DistributedSampler` does where there are as many examples as ranks), or allow unused parameters \
             (`Unused::Allow`)",
            without.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
        );
        Err(Error::argument("Trainer::run", why).on_rank(self.strategy.comm().rank()))
    }

    /// Updates so far.
    pub fn global_step(&self) -> u64 {
        self.updates.steps
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
        self.updates.scaler.as_mut()
    }

    fn accumulate(&mut self, mut micro_batch: impl FnMut(usize) -> Result<Loss<R>>) -> Result<Vec<Loss<R>>> {
        self.strategy.prepare()?;
        let runs = self.updates.config.accumulation;
        let mut losses = Vec::with_capacity(runs);
        for k in 0..runs {
            let loss = micro_batch(k)?;
            let last = k + 1 == runs;
            self.strategy.begin(last)?;
            if last {
                let weight = losses.iter().map(|l: &Loss<R>| l.weight).sum::<f64>() + loss.weight;
                self.strategy.weigh(weight, self.updates.scaler.as_ref().map(LossScaler::factor))?;
            }
            let scaled = self.updates.scaler.as_ref().map(|s| s.scale(&loss.sum)).transpose()?;
            backward_with_hooks(scaled.as_ref().unwrap_or(&loss.sum), &mut self.strategy)?;
            losses.push(Loss { sum: loss.sum.detach(), weight: loss.weight });
        }
        Ok(losses)
    }

    fn update(&mut self, losses: &[Loss<R>]) -> Result<TrainingMetrics<R>> {
        self.strategy.finish()?;
        let comm = self.strategy.comm().clone();
        self.updates.apply(&mut self.strategy, &comm, losses)
    }
}
