//! Lion: the sign of an interpolated momentum.

use numcore::pointwise::Program;

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`Lion`], with PyTorch's names where it has them.
    LionConfig = "Lion" {
        /// The step size `γ`, a third to a tenth of AdamW's.
        lr: f64 = 1e-4, NonNegative;
        /// The decay rates `β₁` of the direction and `β₂` of the momentum.
        betas: [f64; 2] = [0.9, 0.99], Unit;
        /// The decoupled weight decay `λ`: parameters shrink by `λ` times the step size; three to ten times AdamW's.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Lion: `θ ← (1 − γλ)θ − γ sign(β₁m + (1 − β₁)g)`, `m ← β₂m + (1 − β₂)g`.
///
/// Chen et al., *Symbolic Discovery of Optimization Algorithms*, 2023.
pub type Lion<R> = FlatOptimizer<R, LionConfig>;

impl Elementwise for LionConfig {
    fn states(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros("exp_avg")]
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.maximizing(self.maximize).program("lion", |p, g, [m], [lr, keep1, take1, keep2, take2, shrink]| {
            let direction = (m * keep1 + g * take1).sign();
            (p * shrink - direction * lr, [m * keep2 + g * take2])
        })
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let [b1, b2] = self.betas;
        scalars([now.lr, b1, 1.0 - b1, b2, 1.0 - b2, 1.0 - now.lr * self.weight_decay])
    }
}
