//! RAdam: Adam with a rectified variance.

use numcore::pointwise::Program;

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`RAdam`], with PyTorch's names where it has them.
    RAdamConfig = "RAdam" {
        /// The learning rate `γ`.
        lr: f64 = 1e-3, NonNegative;
        /// The decay rates `β₁`, `β₂` of the running means.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// The weight decay coefficient `λ`.
        weight_decay: f64 = 0.0, NonNegative;
        /// True if weight decay shrinks the parameter itself (by `γλ`) instead of adding `λθ` to the gradient.
        decoupled_weight_decay: bool = false, Any;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// RAdam. With Adam's `m` and `v`, `ρ∞ = 2/(1 − β₂) − 1`, `ρₜ = ρ∞ − 2tβ₂ᵗ/(1 − β₂ᵗ)` and
/// `rₜ = √[(ρₜ − 4)(ρₜ − 2)ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)ρₜ)]`:
///
/// `θ ← θ − γ/(1 − β₁ᵗ) · m · rₜ√(1 − β₂ᵗ)/(√v + ε)` where `ρₜ > 5`, `θ ← θ − γ/(1 − β₁ᵗ) · m` before.
///
/// Liu et al., *On the Variance of the Adaptive Learning Rate and Beyond*, 2020.
pub type RAdam<R> = FlatOptimizer<R, RAdamConfig>;

impl RAdamConfig {
    /// The rectification `rₜ`; `None` while `ρₜ ≤ 5`.
    fn rectification(&self, step: u64) -> Option<f64> {
        let (b2, t) = (self.betas[1], step as f64);
        let limit = 2.0 / (1.0 - b2) - 1.0;
        let length = limit - 2.0 * t * b2.powf(t) / (1.0 - b2.powf(t));
        let ratio = (length - 4.0) * (length - 2.0) * limit / ((limit - 4.0) * (limit - 2.0) * length);
        (length > 5.0).then(|| ratio.sqrt())
    }
}

impl Elementwise for RAdamConfig {
    fn states(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros("exp_avg"), StateSpec::zeros("exp_avg_sq")]
    }

    fn program(&self, form: UpdateForm) -> Program {
        let decoupled = self.decoupled_weight_decay;
        form.maximizing(self.maximize).program(
            "radam",
            |p, g, [m, v], [take1, keep2, take2, eps, decay, lr, rectified, adaptive]| {
                let (p, g) = if decoupled { (p * decay, g) } else { (p, g + p * decay) };
                let m = m + (g - m) * take1;
                let v = v * keep2 + g * g * take2;
                let factor = adaptive.gt(0.5).select(rectified / (v.sqrt() + eps), 1.0);
                (p - m * lr * factor, [m, v])
            },
        )
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let ([b1, b2], t) = (self.betas, now.step as f64);
        let r = self.rectification(now.step);
        let rectified = r.unwrap_or(1.0) * (1.0 - b2.powf(t)).sqrt();
        let adaptive = f64::from(u8::from(r.is_some()));
        let decay = if self.decoupled_weight_decay { 1.0 - now.lr * self.weight_decay } else { self.weight_decay };
        scalars([1.0 - b1, b2, 1.0 - b2, self.eps, decay, now.lr / (1.0 - b1.powf(t)), rectified, adaptive])
    }
}
