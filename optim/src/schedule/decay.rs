//! Monotonic schedules.

use super::{LrSchedule, progress};

/// The constant schedule: the base rate at every step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ConstantLr;

impl LrSchedule for ConstantLr {
    fn lr(&self, base: f64, _: u64) -> f64 {
        base
    }
}

/// A step decay, `base · γ^⌊t/size⌋`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLr {
    /// The number of steps between two decays; 0 is taken as 1.
    pub size: u64,
    /// The decay factor `γ`.
    pub gamma: f64,
}

impl LrSchedule for StepLr {
    fn lr(&self, base: f64, step: u64) -> f64 {
        base * self.gamma.powf((step / self.size.max(1)) as f64)
    }
}

/// A decay at milestones: `base · γᵏ` after `k` of them.
#[derive(Clone, Debug, PartialEq)]
pub struct MultiStepLr {
    /// The steps at which the rate decays, in any order; a step named twice counts twice.
    pub milestones: Vec<u64>,
    /// The decay factor `γ`.
    pub gamma: f64,
}

impl LrSchedule for MultiStepLr {
    fn lr(&self, base: f64, step: u64) -> f64 {
        let passed = self.milestones.iter().filter(|&&m| m <= step).count();
        base * self.gamma.powf(passed as f64)
    }
}

/// An exponential decay, `base · γᵗ`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExponentialLr {
    /// The decay factor `γ`.
    pub gamma: f64,
}

impl LrSchedule for ExponentialLr {
    fn lr(&self, base: f64, step: u64) -> f64 {
        base * self.gamma.powf(step as f64)
    }
}

/// A linear schedule from `base · start` to `base · end`, then constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearLr {
    /// The factor at step 0.
    pub start: f64,
    /// The factor from step `total` on.
    pub end: f64,
    /// The number of steps of the linear part.
    pub total: u64,
}

impl LrSchedule for LinearLr {
    fn lr(&self, base: f64, step: u64) -> f64 {
        base * (self.start + (self.end - self.start) * progress(step, self.total))
    }
}

/// A polynomial decay, `base · (1 − t/total)^power`, then 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolynomialLr {
    /// The step at which the rate reaches 0.
    pub total: u64,
    /// The exponent: 1 is linear.
    pub power: f64,
}

impl LrSchedule for PolynomialLr {
    fn lr(&self, base: f64, step: u64) -> f64 {
        base * (1.0 - progress(step, self.total)).powf(self.power)
    }
}
