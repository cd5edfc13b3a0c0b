//! The training step with its loss function.

use adaptive::balance::SpeedShares;
use autograd::no_grad;
use data::{Batch, Batches};
use distributed::{
    checkpoint::Checkpointed,
    strategy::StepRanks,
    train::{Step, StepInput, StepProperties, TrainingMetrics, WeightedSum},
};
use nn::{Module, counted_rows, set_counted_rows};
use numcore::{Error, Result, Runtime};

use super::{Weighting, shares::measured_step};
use crate::{modes::Modes, padding::counted, run::RunEngine, scalars};

/// A training step, its loss function, the weighting of losses, and shares that follow speeds.
pub(super) struct StepWithLoss<S, F> {
    pub step: S,
    pub loss: F,
    pub weighting: Weighting,
    pub shares: Option<SpeedShares>,
}

/// Takes a step over the next batches of an epoch, by given numbers of batches if ranks take them in turn. Returns also
/// the time spent waiting for them, in seconds.
pub(super) fn take_step<R: Runtime, B: Send + 'static>(
    step: &mut impl Step<R>,
    batches: &mut Batches<B>,
    weighting: Weighting,
    shares: Option<&mut SpeedShares>,
    counts: Option<Vec<usize>>,
    loss: &mut dyn FnMut(&Batch<B>) -> Result<StepInput<R>>,
) -> Result<(TrainingMetrics<R>, f64)> {
    let left = usize::try_from(batches.left_in_epoch()).unwrap_or(usize::MAX);
    let micro_batches = step.accumulation().min(left);
    let in_turn = counts.clone().or_else(|| step.properties().in_turn);
    let whole = in_turn.map(|counts| counts.iter().sum::<usize>().min(micro_batches));
    let (mut waited, mut read) = (0.0, 0);
    let metrics = measured_step(step, shares, (micro_batches, counts), &mut |number| {
        if whole.is_some() {
            batches.pass(number.saturating_sub(read) as u64)?;
            read = number + 1;
        }
        let batch = batches.next().ok_or_else(|| Error::internal("Trainer", "the data has ended within an epoch"))?;
        waited += batches.last_wait().as_secs_f64();
        let batch = batch?;
        scalars::set_weight(batch.count as f64);
        // A rank that only takes part in a balanced step has a counted row count of 0, set by the step. Another
        // rank reads the batch too, and records its scalars.
        if whole.is_some() && counted_rows(1) == 0 {
            return Ok((scalars::capture(|| loss(&batch))?.0, 0));
        }
        Ok((counted_input(&batch, weighting, || loss(&batch))?, batch.count))
    });
    scalars::set_weight(1.0);
    set_counted_rows(None);
    let metrics = metrics?;
    if let Some(whole) = whole {
        batches.pass(whole.saturating_sub(read) as u64)?;
    }
    Ok((metrics, waited))
}

/// The input of a batch, of which padding rows do not count; an empty share weighs nothing.
pub(super) fn counted_input<R: Runtime, B, I: Into<StepInput<R>>>(
    batch: &Batch<B>,
    weighting: Weighting,
    loss: impl FnOnce() -> Result<I>,
) -> Result<StepInput<R>> {
    set_counted_rows(counted(batch));
    let input = loss()?.into();
    match (batch.count, weighting) {
        (0, _) => input.weightless(),
        (_, Weighting::ByWeight) => Ok(input),
        (_, Weighting::PerMicroBatch) => input.into_mean(),
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

    fn properties(&self) -> StepProperties {
        self.step.properties()
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
