//! Stochastic gradient descent, with momentum.

use numcore::{Error, Result, pointwise::Program};

use crate::{Config, Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`Sgd`], with PyTorch's names where it has them.
    SgdConfig = "SGD" {
        /// The learning rate `γ`.
        lr: f64 = 1e-3, NonNegative;
        /// The momentum `μ`; with 0 there is no momentum buffer.
        momentum: f64 = 0.0, NonNegative;
        /// The dampening `τ`: from the second step on, the buffer takes `1 − τ` of the gradient.
        dampening: f64 = 0.0, Any;
        /// The weight decay coefficient `λ`: `λθ` is added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to use Nesterov momentum (Sutskever et al. 2013).
        nesterov: bool = false, Any;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Stochastic gradient descent. With `g ← g + λθ`:
///
/// `b ← μb + (1 − τ)g` (`b ← g` at first); `θ ← θ − γb`, or `θ ← θ − γ(g + μb)` with Nesterov's momentum; without
/// momentum `θ ← θ − γg`.
///
/// Sutskever, Martens, Dahl and Hinton, *On the importance of initialization and momentum in deep learning*, 2013.
pub type Sgd<R> = FlatOptimizer<R, SgdConfig>;

impl Elementwise for SgdConfig {
    fn states(&self) -> Vec<StateSpec> {
        if self.momentum == 0.0 { vec![] } else { vec![StateSpec::zeros("momentum_buffer")] }
    }

    fn program(&self, form: UpdateForm) -> Program {
        let (form, nesterov) = (form.maximizing(self.maximize), self.nesterov);
        if self.momentum == 0.0 {
            return form.program("sgd", |p, g, [], [lr, decay, _, _]| (p - (g + p * decay) * lr, []));
        }
        form.program("sgd_momentum", |p, g, [b], [lr, decay, momentum, fresh]| {
            let g = g + p * decay;
            let b = b * momentum + g * fresh;
            let direction = if nesterov { g + b * momentum } else { b };
            (p - direction * lr, [b])
        })
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let fresh = if now.step == 1 { 1.0 } else { 1.0 - self.dampening };
        scalars([now.lr, self.weight_decay, self.momentum, fresh])
    }

    fn consistent(&self) -> Result<()> {
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::config(Self::NAME, "nesterov", "Nesterov's momentum needs a momentum and no dampening"));
        }
        Ok(())
    }
}
