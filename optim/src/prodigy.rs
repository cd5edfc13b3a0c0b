//! Prodigy: Adam, whose step size follows from an estimate of the distance to the solution.

use std::sync::LazyLock;

use numcore::{DType, Error, Result, Runtime, Tensor, ops::cat, pointwise::Program};

use crate::{FlatOptimizer, StateSpec, StepContext, Totals, UpdateMemory, UpdateRule, norms::sum_of};

config! {
    /// Hyper-parameters of [`Prodigy`], with the names and defaults of its authors' code.
    ProdigyConfig = "Prodigy" {
        /// The learning rate `γ`, a factor of the estimated step size. Schedules begin from 1.
        lr: f64 = 1.0, NonNegative;
        /// The decay rates `β₁` and `β₂` of the moments.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The decay rate `β₃` of the sums in the estimate; `√β₂` for `None`.
        beta3: Option<f64> = None, Unit;
        /// The constant `ε` added to the root of the second moment, times `d`.
        eps: f64 = 1e-8, Positive;
        /// The weight decay `λ`.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to shrink parameters, as AdamW does; false to add `λθ` to the gradient.
        decouple: bool = true, Any;
        /// True to use Adam's bias correction.
        use_bias_correction: bool = false, Any;
        /// True to leave the learning rate out of the weights of the sum `s`, for schedules with warmup.
        safeguard_warmup: bool = false, Any;
        /// The first estimate `d₀`.
        d0: f64 = 1e-6, Positive;
        /// The factor of the estimate. Change it, and not the learning rate, to tune the rule.
        d_coef: f64 = 1.0, Positive;
        /// The largest factor by which the estimate grows in an update.
        growth_rate: f64 = f64::INFINITY, AtLeastOne;
        /// The estimate `d`; 0 before the first update.
        d: f64 = 0.0, Adapted;
        /// The estimate by which the last update stepped.
        d_used: f64 = 0.0, Adapted;
        /// The largest estimate so far.
        d_max: f64 = 0.0, Adapted;
        /// The numerator of the estimate.
        d_numerator: f64 = 0.0, Adapted;
    }
}

/// Prodigy. Steps of Adam have the size `γd`, and the estimate `d` begins at the small `d₀`:
///
/// `m ← β₁m + (1 − β₁)dg`, `v ← β₂v + (1 − β₂)d²g²`, `s ← β₃s + γd²g/d₀`, `r ← β₃r + γd²⟨g, θ₀ − θ⟩/d₀`. Then
/// `d' = max(d, r/‖s‖₁)`, over all parameters of all groups and ranks, and `θ ← (1 − γdλ)θ − γd m/(√v + d'ε)`.
///
/// The estimate is a hyper-parameter that the rule changes itself, and the host reads the sums in each update. Use one
/// learning rate for all groups, or 0 for some.
///
/// Mishchenko and Defazio, *Prodigy: An Expeditiously Adaptive Parameter-Free Learner*, 2024.
#[doc(alias("d-adaptation", "dadapt"))]
pub type Prodigy<R> = FlatOptimizer<R, ProdigyConfig>;

/// The program of the states: inputs `[m, v, s, θ₀, g, θ]`, outputs `[m, v, s, θ₀]`.
static STATES: LazyLock<Program> = LazyLock::new(|| {
    Program::new("prodigy_states", |[m, v, s, p0, g, p], [first, keep1, take1, keep2, take2, keep3, take3, decay]| {
        let g = g + p * decay;
        [m * keep1 + g * take1, v * keep2 + g * g * take2, s * keep3 + g * take3, p0 + (p - p0) * first]
    })
});
static NUMERATOR: LazyLock<Program> = LazyLock::new(|| {
    Program::new("prodigy_numerator", |[g, p0, p], [rate, decay]| [(g + p * decay) * (p0 - p) * rate])
});
static DENOMINATOR: LazyLock<Program> = LazyLock::new(|| Program::new("prodigy_denominator", |[s], []| [s.abs()]));
static STEP: LazyLock<Program> = LazyLock::new(|| {
    Program::new("prodigy_step", |[p, m, v], [shrink, lr, eps]| [p * shrink - m / (v.sqrt() + eps) * lr])
});

impl ProdigyConfig {
    /// The estimate for the next update.
    fn estimate(&self) -> f64 {
        if self.d > 0.0 { self.d } else { self.d0 }
    }

    /// The learning rate of an update, bias-corrected.
    fn rate(&self, now: StepContext) -> f64 {
        let ([b1, b2], t) = (self.betas, now.step as f64);
        let unbias = if self.use_bias_correction { (1.0 - b2.powf(t)).sqrt() / (1.0 - b1.powf(t)) } else { 1.0 };
        now.lr * unbias
    }

    fn beta3(&self) -> f64 {
        self.beta3.unwrap_or(self.betas[1].sqrt())
    }
}

impl UpdateRule for ProdigyConfig {
    type Kernel = ();

    fn tensors(&self) -> Vec<StateSpec> {
        ["exp_avg", "exp_avg_sq", "s", "p0"].map(StateSpec::zeros).into()
    }

    fn kernel(&self, _: Option<DType>) -> Result<()> {
        Ok(())
    }

    fn needs_whole(&self) -> bool {
        false
    }

    fn sum_count(&self) -> usize {
        2
    }

    fn sums<R: Runtime>(&self, (): &(), now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<Tensor<R>> {
        let ([b1, b2], b3, d) = (self.betas, self.beta3(), self.estimate());
        let (rate, decay) = (self.rate(now) * d, if self.decouple { 0.0 } else { self.weight_decay });
        let weight = d / self.d0 * if self.safeguard_warmup { d } else { rate };
        let first = f64::from(u8::from(now.step == 1));
        let numbers = match now.lr > 0.0 {
            true => [first, b1, (1.0 - b1) * d, b2, (1.0 - b2) * d * d, b3, weight, decay],
            // States wait for the first rate above 0, except the parameter at the start.
            false => [first, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, decay],
        };
        let (g, p) = (memory.gradient()?, memory.weight()?);
        memory.update_states(0..4, None, &STATES, &[&g, &p], &numbers.map(Into::into))?;
        if now.lr == 0.0 {
            return Tensor::zeros(&memory.runtime(), [2], memory.working());
        }
        let rate = [d / self.d0 * rate, decay].map(Into::into);
        let numerator = sum_of(&NUMERATOR, &[&g, &memory.state(3)?, &p], &rate)?;
        cat(&[&numerator, &sum_of(&DENOMINATOR, &[&memory.state(2)?], &[])?], 0)
    }

    fn adapt(&mut self, totals: &Totals<'_>) -> Result<()> {
        let d = self.estimate();
        (self.d_used, self.d) = (d, d);
        let &[numerator, denominator] = totals.sums else {
            return Err(Error::internal("Prodigy", "it adapts to two sums"));
        };
        // Gradients that are not finite leave the estimate as it is.
        if denominator > 0.0 && numerator.is_finite() && denominator.is_finite() {
            self.d_numerator = self.d_numerator * self.beta3() + numerator;
            let new = self.d_coef * self.d_numerator / denominator;
            let from = if d == self.d0 { d.max(new) } else { d };
            self.d_max = self.d_max.max(self.d0).max(new);
            self.d = self.d_max.min(from * self.growth_rate);
        }
        Ok(())
    }

    fn update<R: Runtime>(&self, (): &(), now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        let rate = self.rate(now) * self.d_used;
        let decay = if self.decouple { self.weight_decay } else { 0.0 };
        let (m, v) = (memory.state(0)?, memory.state(1)?);
        // Without momentum the gradient counts by the new estimate, as in the authors' code.
        let step = if self.betas[0] == 0.0 { rate * self.estimate() / self.d_used } else { rate };
        let numbers = [1.0 - rate * decay, step, self.estimate() * self.eps].map(Into::into);
        memory.update_weight(&STEP, &[&m, &v], &numbers)
    }
}
