//! Stopping a run when a value does not get better.

use numcore::{Result, Runtime};

use super::{Monitor, monitor::SinceBest};
use crate::{Callback, CallbackState, Event, Run};

/// Ends a run when a value of an evaluation has not become better for some evaluations. Evaluations of that value
/// count, not steps. A stopped run that is resumed from its last checkpoint stops again before its first step, unless
/// the patience is longer now. With another monitored value or direction the count begins anew.
///
/// ```
/// use train::{EarlyStop, Monitor};
///
/// let loss = EarlyStop::on("validation/loss").patience(5);
/// let accuracy = EarlyStop::on(Monitor::max("validation/accuracy").min_delta(0.001));
/// # let _ = (loss, accuracy);
/// ```
#[derive(Clone, Debug)]
#[doc(alias("EarlyStopping"))]
pub struct EarlyStop {
    /// The name of the state in checkpoints, with the monitored value's name.
    name: String,
    monitor: Monitor,
    patience: u64,
    stop_at: Option<f64>,
    seen: SinceBest,
}

impl EarlyStop {
    /// Ends a run after 3 evaluations that are no better than the best.
    pub fn on(monitor: impl Into<Monitor>) -> Self {
        let monitor = monitor.into();
        let name = format!("early-stop {}", monitor.note());
        EarlyStop { name, monitor, patience: 3, stop_at: None, seen: SinceBest::default() }
    }

    /// Sets the number of evaluations without a better value after which the run ends.
    pub fn patience(mut self, evaluations: u64) -> Self {
        self.patience = evaluations;
        self
    }

    /// Ends the run, too, as soon as the value is better than this.
    pub fn stop_at(mut self, value: f64) -> Self {
        self.stop_at = Some(value);
        self
    }

    /// The reason to end the run after this value of a step, if there is one.
    fn reason_to_stop(&mut self, value: f64, step: u64) -> Option<String> {
        let name = self.monitor.name();
        if self.stop_at.is_some_and(|bound| self.monitor.clone().min_delta(0.0).is_better(value, Some(bound))) {
            return Some(format!("`{name}` is {value}, better than `stop_at`"));
        }
        self.seen.see(&self.monitor, value, step);
        self.out_of_patience()
    }

    /// The reason to end the run, if the patience is used up.
    fn out_of_patience(&self) -> Option<String> {
        let name = self.monitor.name();
        let SinceBest { best, waited } = self.seen;
        let best = best.map_or("never a number".into(), |best| format!("not better than {}", best.value));
        (waited > 0 && waited >= self.patience).then(|| format!("`{name}` was {best} in {waited} evaluations"))
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for EarlyStop {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        let why = match event {
            // A stopped run that is started again with equal options ends at once.
            Event::Begin => {
                self.monitor.watch(run);
                self.out_of_patience()
            }
            Event::Evaluated(fresh) => {
                let (value, step) = (self.monitor.value(fresh, run)?, run.progress().step);
                value.and_then(|value| self.reason_to_stop(value, step))
            }
            Event::End(_) => {
                if let Some(best) = self.seen.best {
                    run.state.best.entry(self.monitor.name().into()).or_insert(best);
                }
                None
            }
            _ => None,
        };
        if let Some(why) = why {
            run.control().stop(why);
        }
        Ok(())
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn state(&self) -> CallbackState {
        self.seen.to_state()
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.seen = SinceBest::of_state(state)?;
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.monitor.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_evaluations_since_the_best() {
        let mut stop = EarlyStop::on("loss").patience(2);
        let stops: Vec<bool> =
            [3.0, 2.0, 2.5, 1.0, 1.0, f64::NAN].map(|v| stop.reason_to_stop(v, 1).is_some()).to_vec();
        assert_eq!(stops, [false, false, false, false, false, true]);
        let why = EarlyStop::on("loss").patience(1).reason_to_stop(f64::NAN, 1).unwrap();
        assert_eq!(why, "`loss` was never a number in 1 evaluations");
    }

    #[test]
    fn a_value_that_is_good_enough_ends_the_run() {
        let mut stop = EarlyStop::on(Monitor::max("accuracy").min_delta(0.5)).stop_at(0.9);
        assert!(stop.reason_to_stop(0.9, 1).is_none());
        assert!(stop.reason_to_stop(0.91, 2).is_some());
    }
}
