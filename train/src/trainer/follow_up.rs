//! Follow-ups of a step: the requests of callbacks, in one order, until there are no more.

use data::{Batch, State};
use distributed::train::{Step, StepInput, TrainingMetrics};
use numcore::{Error, Result, Runtime};

use super::train_loop::TrainLoop;
use crate::{
    Event, Progress, StopReason,
    control::{Agreed, Selection},
};

/// The number of times that callbacks may request more after one step: one that requests an evaluation after each
/// evaluation would never end.
const ROUNDS: usize = 1000;

/// The work that is left after a step, or before the first one.
pub(super) struct FollowUp<'m, R: Runtime> {
    pub agreed: Agreed,
    /// The epoch of the step.
    epoch: u64,
    /// None before the first step.
    metrics: Option<&'m TrainingMetrics<R>>,
}

impl<'m, R: Runtime> FollowUp<'m, R> {
    pub(super) fn new(agreed: Agreed, epoch: u64, metrics: Option<&'m TrainingMetrics<R>>) -> Self {
        FollowUp { agreed, epoch, metrics }
    }
}

impl<R, M, S, B, F> TrainLoop<'_, R, M, S, B, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
    B: Send + 'static,
{
    /// Carries out the agreed requests, and the requests that callbacks make because of them. Records and saves come
    /// afterwards.
    pub(super) fn follow_up(&mut self, follow: &mut FollowUp<'_, R>) -> Result<()> {
        for _ in 0..ROUNDS {
            if !self.follow_up_once(follow)? {
                return Ok(());
            }
            let later = self.agree()?;
            follow.agreed = std::mem::take(&mut follow.agreed).and(later);
        }
        let why = format!(
            "callbacks have requested something {ROUNDS} times after one step: look for one that does so at every event"
        );
        Err(Error::usage("Run::control", why))
    }

    /// Carries out the first request that is left; false if there is none.
    ///
    /// Going back comes first: nothing may look at weights that are not finite. Skipping batches comes before the end
    /// of the run, as it can reach that end. An epoch is over when its evaluations have run.
    fn follow_up_once(&mut self, follow: &mut FollowUp<'_, R>) -> Result<bool> {
        let agreed = &mut follow.agreed;
        // An interrupted process does not wait for evaluations: the requested ones run when the run is resumed.
        if agreed.stop == Some(StopReason::Interrupted) {
            self.state.owes_evaluation |= agreed.evaluate.take() == Some(Selection::All);
        }
        if std::mem::take(&mut agreed.go_back) {
            if let Some(metrics) = follow.metrics {
                self.record(metrics, agreed)?;
            }
            (agreed.evaluate, agreed.save) = (None, None);
            self.go_back()?;
        } else if agreed.skip > 0 {
            let batches = std::mem::take(&mut agreed.skip);
            self.skip(batches)?;
        } else if let Some(which) = agreed.evaluate.take() {
            self.evaluate(which)?;
        } else if let Some(reason) = self.about_to_end(follow) {
            self.is_ending = Some(reason.clone());
            self.fire(&Event::Ending(&reason))?;
        } else if self.state.progress.epoch > follow.epoch {
            follow.epoch = self.state.progress.epoch;
            self.fire(&Event::EpochEnd)?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    /// The reason for which the run ends after this step; none if it goes on or callbacks have already received this
    /// reason.
    fn about_to_end(&self, follow: &FollowUp<'_, R>) -> Option<StopReason> {
        self.reason_to_end(follow).filter(|reason| self.is_ending.as_ref() != Some(reason))
    }

    /// The reason for which the run ends after this step; none if it goes on. The first reason stays, unless a signal
    /// comes: requests of an evaluation at the end of a run do not replace it.
    pub(super) fn reason_to_end(&self, follow: &FollowUp<'_, R>) -> Option<StopReason> {
        // A run that had its length before it began takes no step, so there is nothing to evaluate or to save.
        let is_finished = follow.metrics.is_some() && self.state.length.is_reached(&self.state.progress);
        let finished = is_finished.then_some(StopReason::Finished);
        match &follow.agreed.stop {
            Some(StopReason::Requested(_)) if is_finished && self.is_ending == finished => finished,
            stop => stop.clone().or(finished),
        }
    }

    /// Skips batches; `u64::MAX` is the rest of the epoch.
    fn skip(&mut self, batches: u64) -> Result<()> {
        let at = self.batches.state();
        let to = match batches {
            u64::MAX if at.position == 0 => return Ok(()),
            u64::MAX => State { epoch: at.epoch + 1, position: 0 },
            n => self.batches.state_after(n).ok_or_else(|| {
                Error::range("Control::skip_batches", "number of batches", n, format!("at most those after {at}"))
            })?,
        };
        self.batches = self.loader.endless(to)?;
        // Intervals that are due now are the ones that the skipped batches would have completed.
        let here = Progress { elapsed: self.state.checked, ..self.state.progress };
        let start = std::mem::replace(&mut self.state.before, here);
        self.take_position();
        self.fire(&Event::Skipped)?;
        self.state.before = start;
        Ok(())
    }
}
