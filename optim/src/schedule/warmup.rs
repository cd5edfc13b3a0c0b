//! Linear warm-up before another schedule; warm-up, stable, decay; and decay by an inverse square root.

use super::{LrSchedule, progress};

/// A linear warm-up to the base rate, before another schedule.
///
/// ```
/// use optim::{Cosine, LrSchedule, Warmup};
/// let schedule = Warmup { steps: 10, start: 0.01 }.then(Cosine { t_max: 90, eta_min: 0.0 });
/// assert_eq!(schedule.lr(1.0, 10), 1.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Warmup {
    /// The number of steps of the warm-up.
    pub steps: u64,
    /// The factor at step 0.
    pub start: f64,
}

impl Warmup {
    /// Creates a warm-up that is never 0: `(t + 1)/(steps + 1)`.
    pub fn rising(steps: u64) -> Self {
        Warmup { steps, start: 1.0 / (steps as f64 + 1.0) }
    }

    /// Appends `next` to this warm-up, starting from its own step 0.
    pub fn then<S: LrSchedule>(self, next: S) -> SequentialLr<S> {
        SequentialLr { warmup: self, next }
    }
}

/// A [`Warmup`] followed by another schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SequentialLr<S> {
    warmup: Warmup,
    next: S,
}

impl<S: LrSchedule> LrSchedule for SequentialLr<S> {
    fn lr(&self, base: f64, step: u64) -> f64 {
        let Warmup { steps, start } = self.warmup;
        match step < steps {
            true => base * (start + (1.0 - start) * progress(step, steps)),
            false => self.next.lr(base, step - steps),
        }
    }
}

/// The shape of the decay at the end of [`Wsd`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cooldown {
    /// A decay along a straight line.
    #[default]
    Linear,
    /// The decay `1 − √t` (Hägele et al. 2024).
    OneMinusSqrt,
}

/// Warm-up, stable, decay: a linear warm-up, a plateau of any length at the base rate, and a decay to `base · end`.
///
/// Hu et al., *MiniCPM*, 2024. Hägele et al., *Scaling Laws and Compute-Optimal Training Beyond Fixed Training
/// Durations*, 2024.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wsd {
    /// The number of steps of the warm-up, as in [`Warmup::rising`].
    pub warmup: u64,
    /// The number of steps of the plateau.
    pub stable: u64,
    /// The number of steps of the decay.
    pub decay: u64,
    /// The fraction of the base rate at the end.
    pub end: f64,
    /// The shape of the decay.
    pub cooldown: Cooldown,
}

impl LrSchedule for Wsd {
    fn lr(&self, base: f64, step: u64) -> f64 {
        let Wsd { stable, decay, end, cooldown, .. } = *self;
        let fall = move |base: f64, step: u64| {
            let at = if step < stable { 0.0 } else { progress(step - stable, decay) };
            let gone = if cooldown == Cooldown::Linear { at } else { at.sqrt() };
            base * (1.0 - (1.0 - end) * gone)
        };
        Warmup::rising(self.warmup).then(fall).lr(base, step)
    }
}

/// A linear warm-up, and a decay by the inverse square root of the step: `base · min((t + 1)/w, √(w/(t + 1)))` for a
/// warm-up of `w` steps. It needs no length of the run.
///
/// Vaswani et al., *Attention Is All You Need*, 2017, whose rate at the end of the warm-up is `base` here.
#[doc(alias("Noam", "get_inverse_sqrt_schedule"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InverseSqrt {
    /// The number of steps of the warm-up; 0 is taken as 1.
    pub warmup: u64,
}

impl LrSchedule for InverseSqrt {
    fn lr(&self, base: f64, step: u64) -> f64 {
        let at = (step as f64 + 1.0) / self.warmup.max(1) as f64;
        base * at.min(1.0 / at.sqrt())
    }
}
