//! Schedules along a cosine curve.

use super::{LrSchedule, Warmup, cosine, progress};

/// A cosine schedule, `η + (base − η)(1 + cos(πt/T))/2`: it falls to `η` in `T` steps, and rises after that (PyTorch's
/// definition). To keep the final rate use [`WarmupCosine`].
///
/// Loshchilov and Hutter, *SGDR: Stochastic Gradient Descent with Warm Restarts*, 2017.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cosine {
    /// The number `T` of steps of the fall.
    pub t_max: u64,
    /// The final rate `η`, an absolute value.
    pub eta_min: f64,
}

impl LrSchedule for Cosine {
    fn lr(&self, base: f64, step: u64) -> f64 {
        cosine(base, self.eta_min, step as f64 / self.t_max.max(1) as f64)
    }
}

/// A cosine schedule like [`Cosine`] with warm restarts: each period is `t_mult` times as long as the one before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CosineRestarts {
    /// The number of steps of the first period.
    pub t_0: u64,
    /// The factor between the lengths of consecutive periods; 1 keeps the length.
    pub t_mult: u64,
    /// The rate at the end of each period, an absolute value.
    pub eta_min: f64,
}

impl LrSchedule for CosineRestarts {
    fn lr(&self, base: f64, step: u64) -> f64 {
        let (mut at, mut length) = (step, self.t_0.max(1));
        if self.t_mult <= 1 {
            at %= length;
        }
        while at >= length {
            at -= length;
            length = length.saturating_mul(self.t_mult);
        }
        cosine(base, self.eta_min, at as f64 / length as f64)
    }
}

/// The usual schedule of language models. It rises to the base rate in `warmup` steps, falls along a cosine to
/// `base · end` until step `total`, and stays there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupCosine {
    /// The number of steps of the warm-up; at its step `t` the rate is `base (t + 1)/(warmup + 1)`, never 0.
    pub warmup: u64,
    /// The step at which the decay ends, counted from the start of the warm-up.
    pub total: u64,
    /// The fraction of the base rate at the end.
    pub end: f64,
}

impl LrSchedule for WarmupCosine {
    fn lr(&self, base: f64, step: u64) -> f64 {
        let (total, end) = (self.total.saturating_sub(self.warmup), self.end);
        let fall = move |base: f64, step: u64| cosine(base, base * end, progress(step, total));
        Warmup::rising(self.warmup).then(fall).lr(base, step)
    }
}
