//! Adamax: Adam with the infinity norm.

use numcore::pointwise::Program;

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`Adamax`], with PyTorch's names where it has them.
    AdamaxConfig = "Adamax" {
        /// The learning rate `γ`.
        lr: f64 = 2e-3, NonNegative;
        /// The decay rates `β₁`, `β₂` of the running mean and of the infinity norm.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The constant `ε` added to the gradient's magnitude.
        eps: f64 = 1e-8, NonNegative;
        /// The weight decay coefficient `λ`: `λθ` is added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Adamax. With `g ← g + λθ`: `m ← β₁m + (1 − β₁)g`, `u ← max(β₂u, |g| + ε)`, `θ ← θ − γ/(1 − β₁ᵗ) · m/u`.
///
/// Kingma and Ba, *Adam: A Method for Stochastic Optimization*, 2015, section 7.
pub type Adamax<R> = FlatOptimizer<R, AdamaxConfig>;

impl Elementwise for AdamaxConfig {
    fn states(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros("exp_avg"), StateSpec::zeros("exp_inf")]
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.maximizing(self.maximize).program("adamax", |p, g, [m, u], [take1, keep2, eps, decay, lr]| {
            let g = g + p * decay;
            let m = m + (g - m) * take1;
            let u = (u * keep2).max(g.abs() + eps);
            (p - m / u * lr, [m, u])
        })
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let [b1, b2] = self.betas;
        let lr = now.lr / (1.0 - b1.powf(now.step as f64));
        scalars([1.0 - b1, b2, self.eps, self.weight_decay, lr])
    }
}
