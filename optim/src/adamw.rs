//! AdamW: Adam with decoupled weight decay.

use numcore::pointwise::Program;

use crate::{
    Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm,
    adam::{Decay, moments, numbers, program},
};

config! {
    /// Hyper-parameters of [`AdamW`], with PyTorch's names where it has them.
    AdamWConfig = "AdamW" {
        /// The learning rate `γ`.
        lr: f64 = 1e-3, NonNegative;
        /// The decay rates `β₁`, `β₂` of the running means.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// The decoupled weight decay `λ`: parameters shrink by `λ` times the step size.
        weight_decay: f64 = 1e-2, NonNegative;
        /// True to divide by the largest second moment so far (AMSGrad, Reddi et al. 2018).
        amsgrad: bool = false, Any;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// AdamW: `θ ← (1 − γλ)θ`, then the step of [`Adam`](crate::Adam) without its weight decay.
///
/// Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, 2019.
pub type AdamW<R> = FlatOptimizer<R, AdamWConfig>;

impl Elementwise for AdamWConfig {
    fn states(&self) -> Vec<StateSpec> {
        moments(self.amsgrad)
    }

    fn program(&self, form: UpdateForm) -> Program {
        program("adamw", form.maximizing(self.maximize), Decay::Decoupled, self.amsgrad)
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        numbers(self.betas, self.eps, 1.0 - now.lr * self.weight_decay, now)
    }
}
