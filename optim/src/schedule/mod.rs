//! Learning rates as pure functions of the step: they have no state to save, and the rate of any step can be computed.

mod cosine;
mod cyclic;
mod decay;
mod warmup;

pub use cosine::{Cosine, CosineRestarts, WarmupCosine};
pub use cyclic::{CyclicTriangular, OneCycle};
pub use decay::{ConstantLr, ExponentialLr, LinearLr, MultiStepLr, PolynomialLr, StepLr};
pub use warmup::{Cooldown, InverseSqrt, SequentialLr, Warmup, Wsd};

use numcore::{Error, Result};

/// The steps ahead for which schedules are compared.
pub(crate) const SAMPLED: [u64; 6] = [0, 1, 10, 100, 1000, 10_000];

/// Checks that every group's learning rate is finite: an update by NaN would make all weights NaN.
pub fn require_rates(op: &'static str, lrs: &[f64]) -> Result<()> {
    match lrs.iter().position(|lr| !lr.is_finite()) {
        None => Ok(()),
        Some(k) => Err(Error::range(op, "learning rate", lrs[k], format!("finite: look at the schedule of group {k}"))),
    }
}

/// A learning-rate schedule: a rate for each step.
///
/// A closure is a schedule too: `|base, step| base / (1.0 + step as f64)`.
#[doc(alias("lr_scheduler"))]
pub trait LrSchedule: Send + Sync {
    /// The rate at a step, from 0, given the base rate.
    fn lr(&self, base: f64, step: u64) -> f64;

    /// The multiplier of the base rate at a step.
    fn factor(&self, step: u64) -> f64 {
        self.lr(1.0, step)
    }
}

impl<F: Fn(f64, u64) -> f64 + Send + Sync> LrSchedule for F {
    fn lr(&self, base: f64, step: u64) -> f64 {
        self(base, step)
    }
}

/// The progress of `step` within `total`, in `[0, 1]`; 1 if `total` is 0.
fn progress(step: u64, total: u64) -> f64 {
    if step >= total { 1.0 } else { step as f64 / total as f64 }
}

/// Interpolates from `start` at 0 to `end` at 1 along half a period of a cosine.
fn cosine(start: f64, end: f64, at: f64) -> f64 {
    end + (start - end) / 2.0 * (1.0 + (std::f64::consts::PI * at).cos())
}
