//! The length of a run: a number of steps, or the number that fits into a time.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use weftgrad::{
    Result, Runtime,
    optim::{Cooldown, LrSchedule, Wsd},
    train::{Callback, CallbackState, Event, Length, Run, StopReason, parsed},
};

/// Steps over which the learning rate rises.
const WARMUP: u64 = 40;
/// The part of a run, in tenths, in which the rate stays at its height. It falls to [`END`] in the rest.
const STABLE: u64 = 7;
/// The factor of the learning rate at the end.
const END: f64 = 0.05;

/// The length of a run. Given seconds, it chooses the number of steps during the run. The learning rate rises and then
/// stays, which requires no number. After seven tenths of the time, the steps taken become seven tenths of the run. So
/// most of the run is measured, whatever else the machine does. The same number given at the start trains the same
/// model.
///
/// The callback sets the length of the run; [`schedule`](Budget::schedule) is its learning rate.
#[derive(Clone, Debug)]
pub struct Budget {
    seconds: f64,
    /// The number of steps, shared with the schedule; 0 until it is known.
    total: Arc<AtomicU64>,
    /// True if a resumed run takes the number in its checkpoint, whatever was given on the command line.
    is_resumed: bool,
}

impl Budget {
    /// A run of this many steps.
    pub fn steps(total: u64) -> Budget {
        Budget { seconds: 0.0, total: Arc::new(total.into()), is_resumed: false }
    }

    /// A run of as many steps as fit into this time.
    pub fn seconds(seconds: f64) -> Budget {
        Budget { seconds, total: Arc::default(), is_resumed: false }
    }

    /// Takes the number of steps from the checkpoint that is resumed, if it has one.
    pub fn resumed(self) -> Budget {
        Budget { is_resumed: true, ..self }
    }

    /// The length of the run, as far as it is known at its beginning.
    pub fn length(&self) -> Length {
        self.total().map_or(Length::Seconds(self.seconds), Length::Steps)
    }

    /// The number of steps, once it is known.
    fn total(&self) -> Option<u64> {
        Some(self.total.load(Ordering::Relaxed)).filter(|&n| n > 0)
    }

    /// Chooses the number of steps after `step` of them in `elapsed` seconds, and returns it; `None` if it is chosen
    /// already or too early.
    fn choose(&self, step: u64, elapsed: f64) -> Option<u64> {
        let due = self.total().is_none() && step > 0 && elapsed >= self.seconds * STABLE as f64 / 10.0;
        // The smallest total of which `step` is seven tenths, rounded down as in `schedule`.
        let total = due.then(|| (10 * step).div_ceil(STABLE))?;
        self.total.store(total, Ordering::Relaxed);
        Some(total)
    }

    /// The learning rate: a rise, a plateau, and a fall over the last three tenths.
    pub fn schedule(&self) -> impl LrSchedule + use<> {
        let total = self.total.clone();
        move |base: f64, step: u64| {
            let total = total.load(Ordering::Relaxed);
            let falls_at = if total == 0 { u64::MAX } else { total * STABLE / 10 };
            let decay = total.saturating_sub(falls_at).max(1);
            let stable = falls_at.saturating_sub(WARMUP);
            Wsd { warmup: WARMUP, stable, decay, end: END, cooldown: Cooldown::Linear }.lr(base, step)
        }
    }
}

impl<R: Runtime, M, B> Callback<R, M, B> for Budget {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            // A resumed run may have chosen before.
            Event::Begin => run.set_length(self.length()),
            // The elapsed time is rank 0's at the end of the last step, so all ranks choose the same number. A step
            // longer than the rest of the time reaches the end before the number is chosen.
            Event::StepBegin | Event::Ending(StopReason::Finished) => {
                let (step, elapsed) = (run.progress().step, run.progress().elapsed.as_secs_f64());
                let Some(total) = self.choose(step, elapsed) else { return Ok(()) };
                run.record_text("budget", format!("{total} steps fit; --steps {total} repeats this run"));
                run.set_length(Length::Steps(total))
            }
            _ => Ok(()),
        }
    }

    fn name(&self) -> &str {
        "budget"
    }

    fn state(&self) -> CallbackState {
        self.total().map(|total| ("total".into(), total.to_string())).into_iter().collect()
    }

    /// Restores the number of the checkpoint, unless the command line gives one.
    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        if (self.is_resumed || self.total().is_none()) && state.contains_key("total") {
            self.total.store(parsed(state, "total")?, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use weftgrad::AnyRuntime;

    use super::*;

    /// The rates of a run whose step `i` ends at `ends[i]` seconds, and its number of steps.
    fn run(seconds: f64, ends: impl Fn(u64) -> f64) -> (Vec<f64>, u64) {
        let budget = Budget::seconds(seconds);
        let (schedule, mut rates) = (budget.schedule(), Vec::new());
        while budget.total().is_none_or(|n| (rates.len() as u64) < n) {
            rates.push(schedule.lr(1.0, rates.len() as u64));
            let step = rates.len() as u64;
            budget.choose(step, ends(step));
        }
        let total = budget.total().unwrap();
        (rates, total)
    }

    #[test]
    fn steps_fill_the_time() {
        for per_step in [0.001, 0.03, 0.5, 3.0] {
            let (_, total) = run(40.0, |step| step as f64 * per_step);
            let takes = total as f64 * per_step;
            assert!((takes - 40.0).abs() <= 2.0 * per_step + 1e-9, "{total} steps of {per_step} s");
        }
        // A first step longer than all of the time.
        assert_eq!(run(40.0, |step| step as f64 * 100.0).1, 2);
    }

    #[test]
    fn the_chosen_number_given_at_the_start_has_the_same_rates() {
        for per_step in [0.02, 0.11, 0.4, 1.7, 90.0] {
            let (rates, total) = run(40.0, |step| step as f64 * per_step);
            let schedule = Budget::steps(total).schedule();
            assert_eq!(rates, (0..total).map(|step| schedule.lr(1.0, step)).collect::<Vec<_>>(), "{total} steps");
        }
    }

    #[test]
    fn a_number_that_is_given_counts_more_than_that_of_the_checkpoint() {
        let restored = |mut budget: Budget| {
            let state = CallbackState::from([("total".into(), "200".into())]);
            Callback::<AnyRuntime, (), ()>::restore(&mut budget, &state).unwrap();
            budget.total()
        };
        assert_eq!(restored(Budget::steps(300)), Some(300));
        assert_eq!(restored(Budget::steps(100).resumed()), Some(200));
        assert_eq!(restored(Budget::seconds(40.0)), Some(200));
    }

    #[test]
    fn the_rate_rises_stays_and_falls() {
        let schedule = Budget::steps(400).schedule();
        let rate = |step| schedule.lr(1.0, step);
        assert_eq!(rate(0), 1.0 / 41.0);
        assert_eq!((rate(40), rate(280)), (1.0, 1.0));
        assert!((rate(340) - (1.0 + END) / 2.0).abs() < 1e-12);
        assert!((rate(400) - END).abs() < 1e-12);
    }

    #[test]
    fn a_machine_that_slows_to_half_ends_soon_after_the_time() {
        for slow_from in [0.0, 5.0, 14.0, 27.9, 28.1] {
            let ends = |step: u64| {
                let quick = step as f64 * 0.02;
                quick + (quick - slow_from).max(0.0)
            };
            let (_, total) = run(40.0, ends);
            assert!(ends(total) <= 1.3 * 40.0 + 0.2, "{total} steps end at {} s", ends(total));
        }
    }
}
