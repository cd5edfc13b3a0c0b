//! Adagrad: step sizes from the sum of squared gradients.

use numcore::pointwise::Program;

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`Adagrad`], with PyTorch's names where it has them.
    AdagradConfig = "Adagrad" {
        /// The learning rate `γ`.
        lr: f64 = 1e-2, NonNegative;
        /// The decay `η` of the step size.
        lr_decay: f64 = 0.0, NonNegative;
        /// The weight decay coefficient `λ`: `λθ` is added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// The initial value of the accumulated squares.
        initial_accumulator_value: f64 = 0.0, NonNegative;
        /// The constant `ε` added to the root of the sum.
        eps: f64 = 1e-10, NonNegative;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Adagrad. With `g ← g + λθ`: `s ← s + g²`, `θ ← θ − γ/(1 + (t − 1)η) · g/(√s + ε)`.
///
/// Duchi, Hazan and Singer, *Adaptive Subgradient Methods for Online Learning and Stochastic Optimization*, 2011.
pub type Adagrad<R> = FlatOptimizer<R, AdagradConfig>;

impl Elementwise for AdagradConfig {
    fn states(&self) -> Vec<StateSpec> {
        vec![StateSpec::filled("sum", self.initial_accumulator_value)]
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.maximizing(self.maximize).program("adagrad", |p, g, [sum], [lr, decay, eps]| {
            let g = g + p * decay;
            let sum = sum + g * g;
            (p - g / (sum.sqrt() + eps) * lr, [sum])
        })
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let lr = now.lr / (1.0 + (now.step - 1) as f64 * self.lr_decay);
        scalars([lr, self.weight_decay, self.eps])
    }
}
