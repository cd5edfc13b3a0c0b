//! Smaller learning rates when a value does not get better.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use numcore::{Error, Result, Runtime};
use optim::LrSchedule;

use super::{Monitor, monitor::SinceBest};
use crate::{Callback, CallbackState, Event, Run, parsed};

/// Multiplies learning rates by a factor when a value of an evaluation has not become better for some evaluations: the
/// rule of PyTorch's `ReduceLROnPlateau`. All ranks see one value, and a resumed run goes on with its factor.
///
/// The callback changes the rates of the [schedules](ReduceOnPlateau::schedule) that it has given out.
///
/// ```
/// use train::ReduceOnPlateau;
///
/// let plateau = ReduceOnPlateau::on("validation/loss").factor(0.5).patience(2);
/// // The rates of another schedule, or the base rate, times the current factor.
/// let schedule = plateau.schedule(optim::Warmup::rising(100).then(optim::ConstantLr));
/// # let _ = schedule;
/// // TrainStep::builder(&comm, &model).optimizer(adamw).schedule(schedule); Trainer::new(..).with(plateau)
/// ```
#[derive(Clone, Debug)]
#[doc(alias("ReduceLROnPlateau"))]
pub struct ReduceOnPlateau {
    /// The name of the state in checkpoints, with the monitored value's name.
    name: String,
    monitor: Monitor,
    factor: f64,
    min_factor: f64,
    patience: u64,
    cooldown: u64,
    /// The best value, and the evaluations since then or since the last reduction.
    seen: SinceBest,
    /// Evaluations that are still not counted.
    cooling: u64,
    current: Arc<CurrentFactor>,
}

/// The factor of learning rates, as bits of an `f64`, which schedules share.
#[derive(Debug)]
struct CurrentFactor(AtomicU64);

impl CurrentFactor {
    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, factor: f64) {
        self.0.store(factor.to_bits(), Ordering::Relaxed);
    }
}

impl ReduceOnPlateau {
    /// Multiplies rates by 0.1 when a value has not become better in more than 10 evaluations.
    pub fn on(monitor: impl Into<Monitor>) -> Self {
        let monitor = monitor.into();
        let name = format!("plateau {}", monitor.note());
        let current = Arc::new(CurrentFactor(AtomicU64::new(1f64.to_bits())));
        let (factor, min_factor, patience, cooldown) = (0.1, 0.0, 10, 0);
        ReduceOnPlateau {
            name,
            monitor,
            factor,
            min_factor,
            patience,
            cooldown,
            seen: SinceBest::default(),
            cooling: 0,
            current,
        }
    }

    /// Sets the factor of a reduction, between 0 and 1.
    pub fn factor(mut self, factor: f64) -> Self {
        self.factor = factor;
        self
    }

    /// Sets the smallest product of all factors, from 0 to 1.
    pub fn min_factor(mut self, factor: f64) -> Self {
        self.min_factor = factor;
        self
    }

    /// Sets the number of evaluations without a better value that are tolerated; the next one reduces the rates.
    pub fn patience(mut self, evaluations: u64) -> Self {
        self.patience = evaluations;
        self
    }

    /// Sets the number of evaluations after a reduction that are not counted.
    pub fn cooldown(mut self, evaluations: u64) -> Self {
        self.cooldown = evaluations;
        self
    }

    /// The rates of another schedule times the current factor of this callback and of its clones.
    pub fn schedule(&self, rates: impl LrSchedule + 'static) -> impl LrSchedule + 'static {
        let current = self.current.clone();
        move |base: f64, step: u64| rates.lr(base, step) * current.get()
    }

    fn evaluated(&mut self, value: f64, step: u64) {
        self.seen.see(&self.monitor, value, step);
        if self.cooling > 0 {
            (self.cooling, self.seen.waited) = (self.cooling - 1, 0);
        }
        if self.seen.waited > self.patience {
            self.current.set((self.current.get() * self.factor).max(self.min_factor));
            (self.cooling, self.seen.waited) = (self.cooldown, 0);
        }
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for ReduceOnPlateau {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Begin => self.monitor.watch(run),
            Event::Evaluated(fresh) => {
                if let Some(value) = self.monitor.value(fresh, run)? {
                    self.evaluated(value, run.progress().step);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn state(&self) -> CallbackState {
        let mut state = self.seen.to_state();
        state.insert("cooling".into(), self.cooling.to_string());
        state.insert("factor".into(), self.current.get().to_string());
        state
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        let factor = parsed(state, "factor")?;
        (self.seen, self.cooling) = (SinceBest::of_state(state)?, parsed(state, "cooling")?);
        self.current.set(factor);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let wrong = |field: &'static str, value: f64, allowed: &str| {
            Err(Error::config("ReduceOnPlateau", field, format!("cannot be {value}: {allowed}")))
        };
        if !(self.factor > 0.0 && self.factor < 1.0) {
            return wrong("factor", self.factor, "between 0 and 1");
        }
        if !(0.0..=1.0).contains(&self.min_factor) {
            return wrong("min_factor", self.min_factor, "from 0 to 1");
        }
        if Arc::strong_count(&self.current) == 1 {
            let why = "no schedule has its factor: give `ReduceOnPlateau::schedule` to the training step";
            return Err(Error::config("ReduceOnPlateau", "schedule", why));
        }
        self.monitor.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The factors after each value.
    fn factors(mut plateau: ReduceOnPlateau, values: &[f64]) -> Vec<f64> {
        let of = |(step, &value): (usize, &f64)| {
            plateau.evaluated(value, step as u64);
            plateau.current.get()
        };
        values.iter().enumerate().map(of).collect()
    }

    /// The factors of `torch.optim.lr_scheduler.ReduceLROnPlateau`, with `threshold=0`.
    #[test]
    fn rates_fall_as_pytorchs_do() {
        let plateau = || ReduceOnPlateau::on("loss").factor(0.5).patience(1);
        let flat = [1.0; 7];
        assert_eq!(factors(plateau(), &flat), [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]);
        assert_eq!(factors(plateau().cooldown(2), &flat), [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25]);
        assert_eq!(factors(plateau().min_factor(0.4), &flat), [1.0, 1.0, 0.5, 0.5, 0.4, 0.4, 0.4]);
        assert_eq!(factors(plateau(), &[3.0, 3.0, 2.0, f64::NAN, 2.5, 1.0]), [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]);
        let accuracy = ReduceOnPlateau::on(Monitor::max("accuracy")).patience(0);
        assert_eq!(factors(accuracy, &[0.1, 0.2, 0.2]), [1.0, 1.0, 0.1]);
    }

    #[test]
    fn options_that_do_nothing_are_errors() {
        let check = |plateau: &ReduceOnPlateau| Callback::<numcore::NullRuntime, (), ()>::check(plateau);
        let plateau = ReduceOnPlateau::on("loss");
        assert!(check(&plateau).unwrap_err().to_string().contains("no schedule has its factor"));
        let schedule = plateau.schedule(optim::ConstantLr);
        assert!(check(&plateau).is_ok());
        for wrong in [plateau.clone().factor(1.0), plateau.clone().factor(f64::NAN), plateau.clone().min_factor(-0.1)] {
            assert!(check(&wrong).is_err());
        }
        plateau.current.set(0.25);
        assert_eq!(schedule.lr(2.0, 7), 0.5);
    }
}
