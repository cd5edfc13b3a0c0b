//! NAdam: Adam with Nesterov's momentum.

use numcore::pointwise::Program;

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`NAdam`], with PyTorch's names where it has them.
    NAdamConfig = "NAdam" {
        /// The learning rate `γ`.
        lr: f64 = 2e-3, NonNegative;
        /// The decay rates `β₁`, `β₂` of the running means.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// The weight decay coefficient `λ`.
        weight_decay: f64 = 0.0, NonNegative;
        /// The rate `ψ` at which the momentum rises to `β₁`.
        momentum_decay: f64 = 4e-3, NonNegative;
        /// True if weight decay shrinks the parameter itself (by `γλ`) instead of adding `λθ` to the gradient.
        decoupled_weight_decay: bool = false, Any;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// NAdam. With `μₜ = β₁(1 − ½ · 0.96^{tψ})`, `Mₜ = Πᵢ₌₁ᵗ μᵢ`, and Adam's `m` and `v`:
///
/// `θ ← θ − γ [ (1 − μₜ)/(1 − Mₜ) · g + μₜ₊₁/(1 − Mₜ₊₁) · m ] / (√(v/(1 − β₂ᵗ)) + ε)`.
///
/// Dozat, *Incorporating Nesterov Momentum into Adam*, 2016.
pub type NAdam<R> = FlatOptimizer<R, NAdamConfig>;

impl NAdamConfig {
    fn momentum(&self, step: u64) -> f64 {
        self.betas[0] * (1.0 - 0.5 * 0.96f64.powf(step as f64 * self.momentum_decay))
    }

    /// The product `Mₜ` as a function of the step, so no state is kept and resuming is exact. Once `1 − Mₜ` rounds to
    /// 1, further factors change nothing, which bounds the loop.
    fn product(&self, step: u64) -> f64 {
        let mut product = 1.0;
        for t in 1..=step {
            product *= self.momentum(t);
            if product < f64::EPSILON / 4.0 {
                break;
            }
        }
        product
    }
}

impl Elementwise for NAdamConfig {
    fn states(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros("exp_avg"), StateSpec::zeros("exp_avg_sq")]
    }

    fn program(&self, form: UpdateForm) -> Program {
        let decoupled = self.decoupled_weight_decay;
        form.maximizing(self.maximize).program(
            "nadam",
            |p, g, [m, v], [take1, keep2, take2, eps, decay, unbias, of_grad, of_mean]| {
                let (p, g) = if decoupled { (p * decay, g) } else { (p, g + p * decay) };
                let m = m + (g - m) * take1;
                let v = v * keep2 + g * g * take2;
                let denominator = (v * unbias).sqrt() + eps;
                (p - (g * of_grad + m * of_mean) / denominator, [m, v])
            },
        )
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let [b1, b2] = self.betas;
        let (mu, next) = (self.momentum(now.step), self.momentum(now.step + 1));
        let product = self.product(now.step);
        let of_grad = now.lr * (1.0 - mu) / (1.0 - product);
        let of_mean = now.lr * next / (1.0 - product * next);
        let unbias = 1.0 / (1.0 - b2.powf(now.step as f64));
        let decay = if self.decoupled_weight_decay { 1.0 - now.lr * self.weight_decay } else { self.weight_decay };
        scalars([1.0 - b1, b2, 1.0 - b2, self.eps, decay, unbias, of_grad, of_mean])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_is_the_product() {
        let c = NAdamConfig::default();
        let all = |n: u64| (1..=n).map(|t| c.momentum(t)).product::<f64>();
        assert_eq!(c.product(20), all(20));
        assert_eq!(1.0 - c.product(1_000_000_000), 1.0);
    }
}
