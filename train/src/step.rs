//! What the loop asks of a training step, of whatever kind.

use distributed::{
    checkpoint::Checkpointed,
    comm::{Comm, Communicator},
    train::{Loss, Strategy, TrainStep, TrainingMetrics},
};
use numcore::{Result, Runtime};

/// A training step that a [`Trainer`](crate::Trainer) can loop over.
pub trait LoopStep<R: Runtime>: Checkpointed<R> {
    /// What a micro-batch becomes in the caller's function: a [`Loss`].
    type Work;

    /// The ranks, which agree on what is done.
    fn comm(&self) -> &Comm<R>;

    /// Which share of a batch this rank reads, of how many.
    fn share(&self) -> (usize, usize) {
        (self.comm().rank(), self.comm().size())
    }

    /// Micro-batches in a step.
    fn accumulation(&self) -> usize;

    /// Updates so far.
    fn global_step(&self) -> u64;

    /// One step of so many micro-batches, as many on all ranks.
    fn step(
        &mut self,
        micro_batches: usize,
        work: &mut dyn FnMut(usize) -> Result<Self::Work>,
    ) -> Result<TrainingMetrics<R>>;

    /// What a share without examples becomes: what weighs nothing.
    fn weightless(work: Self::Work) -> Result<Self::Work>;

    /// What counts as much as any other micro-batch's.
    fn into_mean(work: Self::Work) -> Result<Self::Work>;

    /// Sum and weight of this rank's losses, without gradients.
    fn evaluate(&mut self, work: Self::Work) -> Result<(f64, f64)>;
}

impl<R: Runtime, S: Strategy<R> + Checkpointed<R>> LoopStep<R> for TrainStep<R, S> {
    type Work = Loss<R>;

    fn comm(&self) -> &Comm<R> {
        self.strategy().comm()
    }

    fn accumulation(&self) -> usize {
        TrainStep::accumulation(self)
    }

    fn global_step(&self) -> u64 {
        TrainStep::global_step(self)
    }

    fn step(
        &mut self,
        micro_batches: usize,
        work: &mut dyn FnMut(usize) -> Result<Loss<R>>,
    ) -> Result<TrainingMetrics<R>> {
        self.step_with(micro_batches, work)
    }

    fn weightless(work: Loss<R>) -> Result<Loss<R>> {
        work.weightless()
    }

    fn into_mean(work: Loss<R>) -> Result<Loss<R>> {
        work.into_mean()
    }

    fn evaluate(&mut self, work: Loss<R>) -> Result<(f64, f64)> {
        Ok((work.total().item()?, work.weight()))
    }
}
