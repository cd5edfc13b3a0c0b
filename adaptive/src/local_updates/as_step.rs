//! Local updates as one training step.

use autograd::set_random_stream;
use nn::Module;
use numcore::{DType, Result, Runtime, Tensor};

use super::{LocalSteps, LocalUpdates, OuterRule};
use distributed::{
    combinations::{Feature, Features},
    comm::{Comm, Communicator, abort_on_err},
    strategy::{BatchShare, StepRanks},
    train::{Step, StepInput, StepProperties, StepWork, TrainingMetrics, WeightedSum},
};

/// Each rank takes steps of its own, and the metrics are the rank's own. Only the weight is that of all ranks, so that
/// they count tokens alike; it takes two small exchanges.
impl<R: Runtime, S: Step<R>> Step<R> for LocalSteps<R, S> {
    fn ranks(&self) -> &StepRanks<R> {
        &self.ranks
    }

    fn accumulation(&self) -> usize {
        self.inner.accumulation()
    }

    fn global_step(&self) -> u64 {
        self.steps
    }

    fn learning_rate(&self) -> f64 {
        self.inner.learning_rate()
    }

    fn step(&mut self, work: StepWork<'_, R>) -> Result<TrainingMetrics<R>> {
        abort_on_err(&self.comm, self.everyone().map(drop))?;
        let metrics = self.take(work)?;
        let weight = Tensor::full(self.comm.runtime(), [], DType::F64, self.weight_of_all()?)?;
        Ok(metrics.with_weight(weight))
    }

    fn evaluate(&mut self, input: StepInput<R>) -> Result<WeightedSum> {
        self.inner.evaluate(input)
    }

    fn properties(&self) -> StepProperties {
        let inner = self.inner.properties();
        StepProperties { features: with_local(inner.features, &self.options, &*self.rule), ..inner }
    }

    fn modules(&self) -> Vec<&dyn Module<R>> {
        self.inner.modules()
    }
}

/// The features of an inner step, with those of its local updates.
pub(super) fn with_local<R: Runtime>(inner: Features, options: &LocalUpdates, rule: &dyn OuterRule<R>) -> Features {
    inner.and(Feature::Local).and_if(!makes_weights_equal(options, rule), Feature::WeightsDiffer)
}

/// Tells whether all ranks have equal weights after a synchronization.
pub(super) fn makes_weights_equal<R: Runtime>(options: &LocalUpdates, rule: &dyn OuterRule<R>) -> bool {
    let keep = if options.delay == 0 { 0.0 } else { options.keep };
    options.fragments == 1 && keep == 0.0 && rule.keep() == 0.0
}

/// The ranks of a step, of the ranks that synchronize and those of an inner step. Each draws random values of its own.
pub(super) fn ranks_of<R: Runtime>(comm: &Comm<R>, inside: StepRanks<R>) -> StepRanks<R> {
    let BatchShare { index, of } = inside.share;
    let share = BatchShare { index: comm.rank() * of + index, of: comm.size() * of };
    set_random_stream(share.index as u32);
    let (everyone, losses) = (comm.clone(), comm.clone());
    StepRanks { everyone, losses, share, random_stream: share.index, context_ranks: 1, ..inside }
}
