//! A monitored value: its direction, and the smallest improvement.

use numcore::{Error, Result, Runtime, Within};

use crate::{BestValue, CallbackState, Run, parsed};

/// A value of an evaluation that a decision depends on, and the direction in which it gets better. The value is reduced
/// over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Monitor {
    name: String,
    maximize: bool,
    min_delta: f64,
}

impl Monitor {
    /// Monitors a value such as `validation/loss`, of which less is better.
    pub fn min(name: impl Into<String>) -> Self {
        Monitor { name: name.into(), maximize: false, min_delta: 0.0 }
    }

    /// Monitors a value such as `validation/accuracy`, of which more is better.
    pub fn max(name: impl Into<String>) -> Self {
        Monitor { maximize: true, ..Monitor::min(name) }
    }

    /// Sets the difference that an improvement must exceed to count.
    pub fn min_delta(mut self, delta: f64) -> Self {
        self.min_delta = delta;
        self
    }

    /// The name of the value.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Tells whether a value is better than the best so far. NaN is never better, and any number is better than NaN.
    pub fn is_better(&self, value: f64, best: Option<f64>) -> bool {
        let Some(best) = best.filter(|best| !best.is_nan()) else { return !value.is_nan() };
        if self.maximize { value > best + self.min_delta } else { value < best - self.min_delta }
    }

    /// The value among the fresh ones of evaluations; none if no evaluation that has it ran now.
    ///
    /// # Errors
    /// An error if every evaluation of the run has run, and none has given it: the name is wrong.
    #[track_caller]
    pub fn value<R: Runtime, M, B>(&self, fresh: &[(String, f64)], run: &Run<'_, R, M, B>) -> Result<Option<f64>> {
        self.value_among(fresh, run.may_be_evaluated(&self.name)).at_caller()
    }

    fn value_among(&self, fresh: &[(String, f64)], may_come: bool) -> Result<Option<f64>> {
        let now = fresh.iter().find(|(name, _)| *name == self.name).map(|(_, value)| *value);
        if now.is_some() || may_come {
            return Ok(now);
        }
        let names: Vec<&str> = fresh.iter().map(|(name, _)| &**name).collect();
        let why = format!("no evaluation gives `{}`; this one gave {}", self.name, names.join(", "));
        Err(Error::config("Monitor", "name", why))
    }

    /// The direction and name of the value, which name its state in checkpoints: `min validation/loss`.
    pub(crate) fn note(&self) -> String {
        format!("{} {}", if self.maximize { "max" } else { "min" }, self.name)
    }

    /// Declares in [`Begin`](crate::Event::Begin) that a decision needs the value: a run in which nothing can give it
    /// is then an error.
    pub(crate) fn watch<R: Runtime, M, B>(&self, run: &mut Run<'_, R, M, B>) {
        run.state.monitored.insert(self.name.clone());
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.min_delta >= 0.0 {
            return Ok(());
        }
        let why = format!("`min_delta` of `{}` cannot be {}", self.name, self.min_delta);
        Err(Error::config("Monitor", "min_delta", why))
    }
}

/// The best value that a callback has seen, and the number of evaluations since then.
#[derive(Clone, Debug, Default)]
pub(crate) struct SinceBest {
    pub(crate) best: Option<BestValue>,
    pub(crate) waited: u64,
}

impl SinceBest {
    /// Counts an evaluation.
    pub(crate) fn see(&mut self, monitor: &Monitor, value: f64, step: u64) {
        match monitor.is_better(value, self.best.map(|best| best.value)) {
            true => *self = SinceBest { best: Some(BestValue { step, value }), waited: 0 },
            false => self.waited += 1,
        }
    }

    pub(crate) fn to_state(&self) -> CallbackState {
        let mut state = BestValue::to_state(self.best);
        state.insert("waited".into(), self.waited.to_string());
        state
    }

    pub(crate) fn of_state(state: &CallbackState) -> Result<Self> {
        Ok(SinceBest { waited: parsed(state, "waited")?, best: BestValue::of_state(state)? })
    }
}

impl From<&str> for Monitor {
    /// Monitors a value of which less is better.
    fn from(name: &str) -> Self {
        Monitor::min(name)
    }
}

impl BestValue {
    /// The state of the best value in checkpoints; empty if there is none.
    pub(crate) fn to_state(best: Option<Self>) -> CallbackState {
        let numbers = best
            .map(|best| [("best_value".into(), best.value.to_string()), ("best_step".into(), best.step.to_string())]);
        numbers.into_iter().flatten().collect()
    }

    pub(crate) fn of_state(state: &CallbackState) -> Result<Option<Self>> {
        let is_there = state.contains_key("best_value");
        is_there
            .then(|| Ok(BestValue { step: parsed(state, "best_step")?, value: parsed(state, "best_value")? }))
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_is_better_by_more_than_the_delta() {
        let (loss, accuracy) = (Monitor::min("loss").min_delta(0.1), Monitor::max("accuracy"));
        assert!(loss.is_better(5.0, None) && loss.is_better(4.8, Some(5.0)));
        assert!(!loss.is_better(4.95, Some(5.0)) && !loss.is_better(6.0, Some(5.0)));
        assert!(accuracy.is_better(0.6, Some(0.5)) && !accuracy.is_better(0.5, Some(0.5)));
        for monitor in [loss, accuracy] {
            assert!(!monitor.is_better(f64::NAN, None) && !monitor.is_better(f64::NAN, Some(1.0)));
            assert!(monitor.is_better(1.0, Some(f64::NAN)));
        }
    }

    #[test]
    fn a_wrong_name_is_told_with_those_there_are() {
        let fresh = [("validation/loss".to_string(), 1.0), ("validation/accuracy".to_string(), 0.5)];
        let error = Monitor::min("validation/los").value_among(&fresh, false).unwrap_err().to_string();
        assert!(error.contains("`validation/los`; this one gave validation/loss, validation/accuracy"), "{error}");
        assert_eq!(Monitor::min("test/loss").value_among(&fresh, true).unwrap(), None);
        assert_eq!(Monitor::min("validation/loss").value_among(&fresh, false).unwrap(), Some(1.0));
    }
}
