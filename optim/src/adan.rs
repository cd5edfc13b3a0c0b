//! Adan: Nesterov momentum of gradients and of their differences.

use numcore::pointwise::Program;

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`Adan`], with the names and defaults of its authors' code.
    AdanConfig = "Adan" {
        /// The learning rate `γ`, five to ten times AdamW's.
        lr: f64 = 1e-3, NonNegative;
        /// The decay rates `β₁` of gradients, `β₂` of their differences and `β₃` of the second moment.
        betas: [f64; 3] = [0.98, 0.92, 0.99], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// The weight decay `λ`: parameters are divided by `1 + γλ`.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Adan, with `d = g − g₋₁`, the difference of the last two gradients, which is 0 at first:
///
/// `m ← β₁m + (1 − β₁)g`, `v ← β₂v + (1 − β₂)d`, `n ← β₃n + (1 − β₃)(g + β₂d)²`, and with corrections of bias
/// `θ ← (θ − γ (m̂ + β₂v̂) / (√n̂ + ε)) / (1 + γλ)`.
///
/// Xie et al., *Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models*, 2022.
pub type Adan<R> = FlatOptimizer<R, AdanConfig>;

impl Elementwise for AdanConfig {
    fn states(&self) -> Vec<StateSpec> {
        ["exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"].map(StateSpec::zeros).into()
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.maximizing(self.maximize).program(
            "adan",
            |p, g, [m, v, n, before], [take1, take2, keep2, take3, later, of_m, of_v, root, eps, shrink]| {
                let difference = (g - before) * later;
                let (m, v) = (m + (g - m) * take1, v + (difference - v) * take2);
                let ahead = g + difference * keep2;
                let n = n + (ahead * ahead - n) * take3;
                let step = (m * of_m + v * of_v) / (n.sqrt() * root + eps);
                ((p - step) * shrink, [m, v, n, g])
            },
        )
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let ([b1, b2, b3], lr) = (self.betas, now.lr);
        let [c1, c2, c3] = self.betas.map(|b| 1.0 - b.powf(now.step as f64));
        let later = f64::from(u8::from(now.step > 1));
        let shrink = 1.0 / (1.0 + lr * self.weight_decay);
        scalars([1.0 - b1, 1.0 - b2, b2, 1.0 - b3, later, lr / c1, lr * b2 / c2, 1.0 / c3.sqrt(), self.eps, shrink])
    }
}
