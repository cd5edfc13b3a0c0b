//! Adadelta: updates in the units of the parameter.

use numcore::pointwise::Program;

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`Adadelta`], with PyTorch's names where it has them.
    AdadeltaConfig = "Adadelta" {
        /// The learning rate `γ`.
        lr: f64 = 1.0, NonNegative;
        /// The decay rate `ρ` of the running means.
        rho: f64 = 0.9, Unit;
        /// The constant `ε` added under both square roots.
        eps: f64 = 1e-6, NonNegative;
        /// The weight decay coefficient `λ`: `λθ` is added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Adadelta. With `g ← g + λθ`: `v ← ρv + (1 − ρ)g²`, `d = √(u + ε)/√(v + ε) · g`, `u ← ρu + (1 − ρ)d²`, `θ ← θ − γd`.
///
/// Zeiler, *ADADELTA: An Adaptive Learning Rate Method*, 2012.
pub type Adadelta<R> = FlatOptimizer<R, AdadeltaConfig>;

impl Elementwise for AdadeltaConfig {
    fn states(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros("square_avg"), StateSpec::zeros("acc_delta")]
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.maximizing(self.maximize).program("adadelta", |p, g, [v, u], [lr, keep, take, eps, decay]| {
            let g = g + p * decay;
            let v = v * keep + g * g * take;
            let d = (u + eps).sqrt() / (v + eps).sqrt() * g;
            let u = u * keep + d * d * take;
            (p - d * lr, [v, u])
        })
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        scalars([now.lr, self.rho, 1.0 - self.rho, self.eps, self.weight_decay])
    }
}
