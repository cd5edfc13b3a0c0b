//! What the loop needs of a training step, of whatever kind.

use distributed::{
    balance::{BalancedStep, BatchRanges},
    checkpoint::Checkpointed,
    comm::{Comm, Communicator},
    local_updates::{LocalTrainStep, Meeting},
    pipeline::{MicroBatches, PipelineTrainStep},
    train::{Loss, StageStrategy, Strategy, TrainStep, TrainingMetrics},
};
use nn::{Buffer, Module, ModuleExt, Visitor};
use numcore::{DType, Error, Result, Runtime, Tensor};

use crate::{modes::Modes, scalars};

/// A training step that a [`Trainer`](crate::Trainer) can loop over.
pub trait LoopStep<R: Runtime>: Checkpointed<R> {
    /// What a micro-batch becomes in the caller's function: a [`Loss`], or a pipeline's [`MicroBatches`].
    type Work;

    /// The ranks, which agree on what is done.
    fn comm(&self) -> &Comm<R>;

    /// Which share of a batch this rank reads, of how many.
    fn share(&self) -> (usize, usize) {
        (self.comm().rank(), self.comm().size())
    }

    /// Whether what this rank measures of its share counts: of ranks that read the same one, along a tensor axis, the first does.
    fn counts_examples(&self) -> bool {
        true
    }

    /// Where ranks take whole batches in turn, and not each its share of every one: how many all of them take in the next step, of so many that are left in
    /// the epoch. The function that [`step`](LoopStep::step) is given makes a batch of its number among those that are left then, and is asked for them in order.
    fn whole_batches(&self, left: usize) -> Option<usize> {
        let _ = left;
        None
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

    /// How far ranks had gone apart when they met last, where they train by themselves in between.
    fn last_meeting(&self) -> Option<Meeting> {
        None
    }

    /// An error where there is never a step after which another number of ranks could go on.
    fn check_elastic(&self) -> Result<()> {
        Ok(())
    }

    /// What a share without examples becomes: what weighs nothing.
    fn weightless(work: Self::Work) -> Result<Self::Work>;

    /// What counts as much as any other micro-batch's.
    fn into_mean(work: Self::Work) -> Result<Self::Work>;

    /// Buffers of a model that the step has in itself.
    fn buffers(&self) -> Vec<Buffer<R>> {
        Vec::new()
    }

    /// Sum and weight of this rank's losses, without gradients.
    fn evaluate(&mut self, work: Self::Work) -> Result<(f64, f64)>;
}

impl<R: Runtime, S: Strategy<R> + Checkpointed<R>> LoopStep<R> for TrainStep<R, S> {
    type Work = Loss<R>;

    fn comm(&self) -> &Comm<R> {
        self.strategy().everyone()
    }

    fn share(&self) -> (usize, usize) {
        self.strategy().share()
    }

    fn counts_examples(&self) -> bool {
        self.strategy().counts_examples()
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

/// Each rank takes steps of its own, and what the loop is told of one is the rank's own but for its weight, which is that of all ranks: they
/// count tokens alike. A step of the loop has two small exchanges, for that and to agree.
impl<R: Runtime, S: Strategy<R> + Checkpointed<R>> LoopStep<R> for LocalTrainStep<R, S> {
    type Work = Loss<R>;

    fn comm(&self) -> &Comm<R> {
        LocalTrainStep::comm(self)
    }

    fn share(&self) -> (usize, usize) {
        LocalTrainStep::share(self)
    }

    fn accumulation(&self) -> usize {
        self.inner().accumulation()
    }

    fn global_step(&self) -> u64 {
        LocalTrainStep::global_step(self)
    }

    fn step(
        &mut self,
        micro_batches: usize,
        work: &mut dyn FnMut(usize) -> Result<Loss<R>>,
    ) -> Result<TrainingMetrics<R>> {
        if self.inner().strategy().everyone().size() > 1 {
            let why = "the loop agrees with the ranks that meet, and the inner step is one of other ranks too: loop over inner steps of one rank \
                       each, or write the loop";
            return Err(Error::argument("Trainer::run", why));
        }
        let metrics = self.step_with(micro_batches, work)?;
        let weight = Tensor::full(LocalTrainStep::comm(self).runtime(), [], DType::F64, self.weight_of_all()?)?;
        Ok(metrics.weighing(weight))
    }

    fn last_meeting(&self) -> Option<Meeting> {
        LocalTrainStep::last_meeting(self)
    }

    fn check_elastic(&self) -> Result<()> {
        if self.comes_together() {
            return Ok(());
        }
        let why = "fragments that meet in turn, or a rule by which ranks stay apart, leave no step after which all have the same weights, and another number of ranks would \
                   begin without what each has learned: take one fragment and a rule that keeps nothing of a rank's own";
        Err(Error::config("Trainer", "elastic", why))
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

/// Ranks take batches of the loader in turn, each read by one of them, fast ranks more: `Loader::batch` is what one rank computes at once, and the loader has no workers. Counts
/// depend on what was measured, so a run that is resumed is no repetition of one that was not, but reads what that would have read, once.
impl<R: Runtime, S: Strategy<R> + Checkpointed<R>> LoopStep<R> for BalancedStep<R, S> {
    type Work = Loss<R>;

    fn comm(&self) -> &Comm<R> {
        self.inner().strategy().everyone()
    }

    fn share(&self) -> (usize, usize) {
        self.inner().strategy().share()
    }

    fn whole_batches(&self, left: usize) -> Option<usize> {
        Some(self.cadence().counts().iter().sum::<usize>().min(left))
    }

    /// As many as there are.
    fn accumulation(&self) -> usize {
        usize::MAX
    }

    fn global_step(&self) -> u64 {
        self.inner().global_step()
    }

    fn step(
        &mut self,
        micro_batches: usize,
        work: &mut dyn FnMut(usize) -> Result<Loss<R>>,
    ) -> Result<TrainingMetrics<R>> {
        let mut left = BatchRanges::new(micro_batches as u64);
        let own = left.clone().next(self.cadence().counts()).map(|ranges| ranges[LoopStep::comm(self).rank()].clone());
        let weighs = own.is_none_or(|own| !own.is_empty());
        let metrics = BalancedStep::step(self, &mut left, |number| match weighs {
            true => work(number as usize),
            // Another rank reads the batch too, and records what it finds.
            false => scalars::apart(|| work(number as usize)).map(|(work, _)| work),
        })?;
        metrics.ok_or_else(|| Error::internal("Trainer", "a step of no batches"))
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

/// The model of a loop whose step has the model in itself, as a pipeline has its stages: `Trainer::new(&InStep, pipeline, loader)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct InStep;

impl<R: Runtime> Module<R> for InStep {
    fn visit(&self, _: &str, _: &mut dyn Visitor<R>) {}
}

/// Each replica of the pipeline reads its share of a batch, on all of its ranks.
impl<R: Runtime, S: StageStrategy<R>> LoopStep<R> for PipelineTrainStep<R, S> {
    type Work = MicroBatches<R>;

    fn comm(&self) -> &Comm<R> {
        &self.groups().world
    }

    fn share(&self) -> (usize, usize) {
        (self.groups().data.rank(), self.groups().data.size())
    }

    fn counts_examples(&self) -> bool {
        PipelineTrainStep::counts_examples(self)
    }

    fn accumulation(&self) -> usize {
        PipelineTrainStep::accumulation(self)
    }

    fn global_step(&self) -> u64 {
        PipelineTrainStep::global_step(self)
    }

    fn step(
        &mut self,
        micro_batches: usize,
        work: &mut dyn FnMut(usize) -> Result<MicroBatches<R>>,
    ) -> Result<TrainingMetrics<R>> {
        self.step_with(micro_batches, work)
    }

    fn weightless(work: MicroBatches<R>) -> Result<MicroBatches<R>> {
        Ok(MicroBatches { weightless: true, ..work })
    }

    fn into_mean(_: MicroBatches<R>) -> Result<MicroBatches<R>> {
        let why =
            "the loss of a pipeline belongs to its model: give it a mean there, in place of `Weighting::ByWorker`";
        Err(Error::argument("Trainer::run", why))
    }

    fn buffers(&self) -> Vec<Buffer<R>> {
        let stages = self.pipeline().stages().values();
        stages.flat_map(|stage| stage.named_buffers()).map(|(_, buffer)| buffer).collect()
    }

    /// The losses are those of the ranks that have the last stage; others have none.
    fn evaluate(&mut self, work: MicroBatches<R>) -> Result<(f64, f64)> {
        let modes: Vec<Modes> = self.pipeline().stages().values().map(|stage| Modes::evaluating(&**stage)).collect();
        let output = PipelineTrainStep::evaluate(self, work);
        for (stage, modes) in self.pipeline().stages().values().zip(modes) {
            modes.restore(&**stage);
        }
        output?
            .losses()
            .iter()
            .try_fold((0.0, 0.0), |all: (f64, f64), loss| Ok((all.0 + loss.total().item()?, all.1 + loss.weight())))
    }
}
