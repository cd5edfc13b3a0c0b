//! Handling of steps that are not finite.

use numcore::{Error, Result, Runtime};

use crate::{Callback, CallbackState, Event, Run, parsed};

/// Stops a run or goes back when a step's loss, or its gradient norm where that is known, is not finite. The check
/// waits for the device in every step.
///
/// To leave out single updates, use the training step's
/// [`skip_non_finite`](distributed::train::TrainStepBuilder::skip_non_finite), which decides before the update is made.
/// This callback checks after it.
///
/// A loss shows the result of the previous update. With [`max_norm`](distributed::train::TrainStepBuilder::max_norm)
/// the norm of the gradients is known: an update that is not finite is found at its own step, before it is saved.
/// Without it, non-finite gradients of a finite loss can be saved, and are found one step later. Give `max_norm` where
/// a run is to go back.
///
/// ```
/// use train::NonFinite;
///
/// let stop = NonFinite::stop();
/// let go_back = NonFinite::go_back(3);
/// # let _ = (stop, go_back);
/// ```
#[derive(Clone, Debug)]
pub struct NonFinite {
    go_back: u64,
    went: u64,
}

impl NonFinite {
    /// Ends the run with an error that names the step. The last checkpoint, from before it, stays.
    pub fn stop() -> Self {
        NonFinite { go_back: 0, went: 0 }
    }

    /// Goes back to the last checkpoint, and on from there with the next batches, so that the batches since it are left
    /// out. The run ends with an error after going back `times` times, resumed parts of the run included.
    pub fn go_back(times: u64) -> Self {
        NonFinite { go_back: times, went: 0 }
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for NonFinite {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let Event::StepEnd(metrics) = event else { return Ok(()) };
        // An update that was left out has done no harm.
        if !metrics.stepped() {
            return Ok(());
        }
        let (loss, norm) = (metrics.loss()?, metrics.grad_norm()?);
        if loss.is_finite() && norm.is_none_or(f64::is_finite) {
            return Ok(());
        }
        if self.went < self.go_back {
            self.went += 1;
            run.record("went_back", self.went as f64);
            run.control().go_back();
            return Ok(());
        }
        let norm = norm.map_or(String::new(), |norm| format!(" and the norm of the gradients {norm}"));
        let went = if self.went > 0 { format!(", after going back {} times", self.went) } else { String::new() };
        let why = format!(
            "the loss of step {} is {loss}{norm}{went}: lower the learning rate, clip gradients, or look at the data of this step",
            metrics.global_step()
        );
        Err(Error::anomaly("NonFinite", why))
    }

    fn name(&self) -> &str {
        "non-finite"
    }

    fn state(&self) -> CallbackState {
        CallbackState::from([("went".into(), self.went.to_string())])
    }

    /// Keeps the larger count: the checkpoint that a run goes back to has fewer times than the run.
    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.went = self.went.max(parsed(state, "went")?);
        Ok(())
    }
}
