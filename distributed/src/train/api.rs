//! The trait of training steps, and the weighted sums of losses that evaluations return.

use std::{collections::HashMap, sync::Arc};

use nn::Module;
use numcore::{Result, Runtime};

use super::{Loss, StepInput, StepWork, TrainStep, TrainingMetrics};
use crate::{checkpoint::Checkpointed, combinations::Features, strategy::StepRanks};

/// A training step that loops and wrappers take: a [`TrainStep`](super::TrainStep), or a
/// wrapper of one, such as the `LocalSteps` and `Balanced` of the crate `adaptive`.
pub trait Step<R: Runtime>: Checkpointed<R> {
    /// The ranks that take the step together.
    fn ranks(&self) -> &StepRanks<R>;

    /// The number of micro-batches in a step.
    fn accumulation(&self) -> usize;

    /// The number of updates so far.
    fn global_step(&self) -> u64;

    /// The learning rate of the next update (of the first group); 0 if there are no parameters.
    fn learning_rate(&self) -> f64;

    /// Runs one step. An error on one rank is an error on all, and ends the communicator.
    fn step(&mut self, work: StepWork<'_, R>) -> Result<TrainingMetrics<R>>;

    /// The sum and the weight of the losses of an input on this rank, without a backward pass.
    fn evaluate(&mut self, input: StepInput<R>) -> Result<WeightedSum>;

    /// The current properties that decide about combinations of the step.
    fn properties(&self) -> StepProperties;

    /// The modules that the step holds itself, as a pipeline holds its stages.
    fn modules(&self) -> Vec<&dyn Module<R>> {
        Vec::new()
    }
}

/// A sum of losses, and its weight.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WeightedSum {
    /// The sum of losses over examples or tokens.
    pub sum: f64,
    /// The number of examples or tokens in the sum.
    pub weight: f64,
}

/// Properties of a training step that decide about its combinations with wrappers and loops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepProperties {
    /// Features of the step.
    pub features: Features,
    /// The numbers of complete batches that the ranks of each share take in the next step, if ranks read batches in
    /// turn. None if each rank reads its share of every batch.
    pub in_turn: Option<Vec<usize>>,
    /// The copies of tied parameters that this rank has in later stages, by [`Leaf::id`](autograd::Leaf::id): the
    /// parameters' names in checkpoints. A copy may have the name of the parameter itself.
    pub copies: Arc<HashMap<usize, String>>,
}

impl<R: Runtime> Step<R> for TrainStep<R> {
    fn ranks(&self) -> &StepRanks<R> {
        self.strategy.ranks()
    }

    fn accumulation(&self) -> usize {
        self.updates.config.accumulation
    }

    fn global_step(&self) -> u64 {
        self.updates.steps
    }

    fn learning_rate(&self) -> f64 {
        self.strategy.learning_rate().unwrap_or(0.0)
    }

    fn step(&mut self, work: StepWork<'_, R>) -> Result<TrainingMetrics<R>> {
        self.step_of(work)
    }

    fn evaluate(&mut self, input: StepInput<R>) -> Result<WeightedSum> {
        let losses = match (&mut self.stages, input) {
            (None, input) => vec![input.loss()?],
            (Some(stages), input) => stages.evaluate(&mut *self.strategy, input.run()?)?.losses,
        };
        let add = |all: WeightedSum, loss: &Loss<R>| {
            Ok(WeightedSum { sum: all.sum + loss.total().item()?, weight: all.weight + loss.weight() })
        };
        losses.iter().try_fold(WeightedSum::default(), add)
    }

    fn properties(&self) -> StepProperties {
        let copies = self.stages.as_ref().map(|stages| stages.copies.clone()).unwrap_or_default();
        StepProperties { features: self.strategy.features(), in_turn: None, copies }
    }

    fn modules(&self) -> Vec<&dyn Module<R>> {
        self.stages.as_ref().map_or_else(Vec::new, |stages| stages.modules())
    }
}

impl<R: Runtime, S: Step<R> + ?Sized> Step<R> for Box<S> {
    fn ranks(&self) -> &StepRanks<R> {
        (**self).ranks()
    }

    fn accumulation(&self) -> usize {
        (**self).accumulation()
    }

    fn global_step(&self) -> u64 {
        (**self).global_step()
    }

    fn learning_rate(&self) -> f64 {
        (**self).learning_rate()
    }

    fn step(&mut self, work: StepWork<'_, R>) -> Result<TrainingMetrics<R>> {
        (**self).step(work)
    }

    fn evaluate(&mut self, input: StepInput<R>) -> Result<WeightedSum> {
        (**self).evaluate(input)
    }

    fn properties(&self) -> StepProperties {
        (**self).properties()
    }

    fn modules(&self) -> Vec<&dyn Module<R>> {
        (**self).modules()
    }
}
