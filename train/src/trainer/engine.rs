//! The training step with its loss function.

use autograd::no_grad;
use data::{Batch, Batches};
use distributed::{
    checkpoint::Checkpointed,
    combinations::Features,
    strategy::StepRanks,
    train::{Step, StepInput, StepWork, TrainingMetrics, WeightedSum},
};
use nn::{Module, counted_rows, set_counted_rows};
use numcore::{Error, Result, Runtime};

use super::Weighting;
use crate::{modes::Modes, padding::counted, run::RunEngine, scalars};

/// A training step, its loss function, and the weighting of losses.
pub(super) struct StepWithLoss<S, F> {
    pub step: S,
    pub loss: F,
    pub weighting: Weighting,
}

impl<S, F> StepWithLoss<S, F> {
    /// Takes a step over the next batches; returns also the time spent waiting for them, in seconds.
    pub(super) fn take<R, M, B>(
        &mut self,
        model: &M,
        batches: &mut Batches<B>,
        micro_batches: usize,
    ) -> Result<(TrainingMetrics<R>, f64)>
    where
        R: Runtime,
        S: Step<R>,
        F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
        B: Send + 'static,
    {
        let (mut waited, mut read, StepWithLoss { step, loss, weighting }) = (0.0, 0, self);
        let whole = step.properties().in_turn.map(|whole| whole.min(micro_batches));
        let metrics = step.step(StepWork::new(micro_batches, &mut |number| {
            if whole.is_some() {
                batches.pass(number.saturating_sub(read) as u64)?;
                read = number + 1;
            }
            let batch =
                batches.next().ok_or_else(|| Error::internal("Trainer", "the data has ended within an epoch"))?;
            waited += batches.last_wait().as_secs_f64();
            let batch = batch?;
            scalars::set_weight(batch.count as f64);
            // A rank that only takes part in a balanced step has a counted row count of 0, set by the step. Another
            // rank reads the batch too, and records its scalars.
            if whole.is_some() && counted_rows(1) == 0 {
                return Ok(scalars::capture(|| loss(model, &batch))?.0);
            }
            set_counted_rows(counted(&batch));
            let work = loss(model, &batch)?;
            match (batch.count, *weighting) {
                (0, _) => work.weightless(),
                (_, Weighting::ByWeight) => Ok(work),
                (_, Weighting::PerMicroBatch) => work.into_mean(),
            }
        }));
        scalars::set_weight(1.0);
        set_counted_rows(None);
        let metrics = metrics?;
        if let Some(whole) = whole {
            batches.pass(whole.saturating_sub(read) as u64)?;
        }
        Ok((metrics, waited))
    }
}

impl<R, M, B, S, F> RunEngine<R, M, B> for StepWithLoss<S, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
{
    fn ranks(&self) -> &StepRanks<R> {
        self.step.ranks()
    }

    fn features(&self) -> Features {
        self.step.properties().features
    }

    fn modules(&self) -> Vec<&dyn Module<R>> {
        self.step.modules()
    }

    fn state(&mut self) -> &mut dyn Checkpointed<R> {
        &mut self.step
    }

    fn evaluate(&mut self, model: &M, batch: &Batch<B>) -> Result<WeightedSum> {
        scalars::set_weight(batch.count as f64);
        let work = no_grad(|| (self.loss)(model, batch))?;
        let modes: Vec<Modes> = self.step.modules().into_iter().map(Modes::evaluating).collect();
        let sum = self.step.evaluate(work);
        self.step.modules().into_iter().zip(modes).for_each(|(module, modes)| modes.restore(module));
        let sum = sum?;
        Ok(if batch.count == 0 { WeightedSum::default() } else { sum })
    }
}
