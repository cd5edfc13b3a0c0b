//! The training step with its loss function.

use autograd::no_grad;
use data::{Batch, Batches};
use distributed::{checkpoint::Checkpointed, comm::Comm, local_updates::Meeting, train::TrainingMetrics};
use nn::{CountedRows, counted_rows, set_counted_rows};
use numcore::{Error, Result, Runtime};

use super::Weighting;
use crate::{LoopStep, run::RunEngine, scalars};

/// A step, and what it computes of a batch.
pub(super) struct StepWithLoss<S, F> {
    pub step: S,
    pub loss: F,
    pub weighting: Weighting,
}

impl<S, F> StepWithLoss<S, F> {
    /// A step of the next batches; gives how long it waited for them, in seconds, too.
    pub fn take<R, M, B>(
        &mut self,
        model: &M,
        batches: &mut Batches<B>,
        micro_batches: usize,
    ) -> Result<(TrainingMetrics<R>, f64)>
    where
        R: Runtime,
        S: LoopStep<R>,
        F: FnMut(&M, &Batch<B>) -> Result<S::Work>,
        B: Send + 'static,
    {
        let (mut waited, mut read, StepWithLoss { step, loss, weighting }) = (0.0, 0, self);
        let whole = step.whole_batches(micro_batches);
        let metrics = step.step(micro_batches, &mut |number| {
            if whole.is_some() {
                batches.pass(number.saturating_sub(read) as u64)?;
                read = number + 1;
            }
            let batch =
                batches.next().ok_or_else(|| Error::internal("Trainer", "the data has ended within an epoch"))?;
            waited += batches.last_wait().as_secs_f64();
            let batch = batch?;
            scalars::set_weight(batch.count as f64);
            // A rank that only takes part in a balanced step was told so by the step.
            if whole.is_none() || counted_rows(1) != 0 {
                set_counted_rows(counted(&batch));
            }
            let work = loss(model, &batch)?;
            match (batch.count, *weighting) {
                (0, _) => S::weightless(work),
                (_, Weighting::ByWeight) => Ok(work),
                (_, Weighting::ByWorker) => S::into_mean(work),
            }
        });
        scalars::set_weight(1.0);
        set_counted_rows(None);
        let metrics = metrics?;
        if let Some(whole) = whole {
            batches.pass(whole.saturating_sub(read) as u64)?;
        }
        Ok((metrics, waited))
    }
}

/// What layers are told of the rows of a batch, if some only fill it up.
pub(super) fn counted<B>(batch: &Batch<B>) -> Option<CountedRows> {
    let Batch { count, rows, .. } = *batch;
    (count < rows).then_some(CountedRows { count, rows })
}

impl<R, M, B, S, F> RunEngine<R, M, B> for StepWithLoss<S, F>
where
    R: Runtime,
    S: LoopStep<R>,
    F: FnMut(&M, &Batch<B>) -> Result<S::Work>,
{
    fn comm(&self) -> &Comm<R> {
        self.step.comm()
    }

    fn share(&self) -> (usize, usize) {
        self.step.share()
    }

    fn counts_examples(&self) -> bool {
        self.step.counts_examples()
    }

    fn state(&mut self) -> &mut dyn Checkpointed<R> {
        &mut self.step
    }

    fn last_meeting(&self) -> Option<Meeting> {
        self.step.last_meeting()
    }

    fn evaluate(&mut self, model: &M, batch: &Batch<B>) -> Result<(f64, f64)> {
        scalars::set_weight(batch.count as f64);
        let work = no_grad(|| (self.loss)(model, batch))?;
        let (sum, weight) = self.step.evaluate(work)?;
        Ok(if batch.count == 0 { (0.0, 0.0) } else { (sum, weight) })
    }
}
