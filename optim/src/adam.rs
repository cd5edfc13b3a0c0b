//! Adam and AMSGrad, and the program shared with AdamW.

use numcore::pointwise::{Expr, Program};

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`Adam`], with PyTorch's names where it has them.
    AdamConfig = "Adam" {
        /// The learning rate `γ`.
        lr: f64 = 1e-3, NonNegative;
        /// The decay rates `β₁`, `β₂` of the running means.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// The weight decay coefficient `λ`: `λθ` is added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to divide by the largest second moment so far (AMSGrad, Reddi et al. 2018).
        amsgrad: bool = false, Any;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Adam. With `g ← g + λθ`:
///
/// `m ← β₁m + (1 − β₁)g`, `v ← β₂v + (1 − β₂)g²`, `θ ← θ − γ/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)`; AMSGrad takes the
/// largest `v` so far.
///
/// Kingma and Ba, *Adam: A Method for Stochastic Optimization*, 2015. Reddi, Kale and Kumar, *On the Convergence of
/// Adam and Beyond*, 2018.
pub type Adam<R> = FlatOptimizer<R, AdamConfig>;

impl Elementwise for AdamConfig {
    fn states(&self) -> Vec<StateSpec> {
        moments(self.amsgrad)
    }

    fn program(&self, form: UpdateForm) -> Program {
        program("adam", form.maximizing(self.maximize), Decay::Coupled, self.amsgrad)
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        numbers(self.betas, self.eps, self.weight_decay, now)
    }
}

/// The state tensors of Adam and AdamW.
pub(crate) fn moments(amsgrad: bool) -> Vec<StateSpec> {
    let names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
    names[..2 + usize::from(amsgrad)].iter().map(|n| StateSpec::zeros(n)).collect()
}

/// The run-time scalars of Adam; `decay` is the factor of the parameter for weight decay.
pub(crate) fn numbers([b1, b2]: [f64; 2], eps: f64, decay: f64, now: StepContext) -> Scalars {
    let t = now.step as f64;
    let (unbias1, unbias2) = (1.0 / (1.0 - b1.powf(t)), 1.0 / (1.0 - b2.powf(t)));
    scalars([1.0 - b1, b2, 1.0 - b2, eps, decay, unbias2.sqrt(), now.lr * unbias1])
}

/// The kinds of weight decay: added to the gradient (coupled), or shrinking the parameter itself (decoupled).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decay {
    Coupled,
    Decoupled,
}

pub(crate) fn program(name: &'static str, form: UpdateForm, decay: Decay, amsgrad: bool) -> Program {
    if amsgrad {
        return form.program(name, |p, g, [m, v, top], s| {
            let (p, [m, v, top]) = step([p, g, m, v], Some(top), s, decay);
            (p, [m, v, top])
        });
    }
    form.program(name, |p, g, [m, v], s| {
        let (p, [m, v, _]) = step([p, g, m, v], None, s, decay);
        (p, [m, v])
    })
}

/// The new parameter and moments. `top` is the largest second moment so far, for AMSGrad.
fn step<'b>(
    [p, g, m, v]: [Expr<'b>; 4],
    top: Option<Expr<'b>>,
    [take1, keep2, take2, eps, factor, unbias, lr]: [Expr<'b>; 7],
    decay: Decay,
) -> (Expr<'b>, [Expr<'b>; 3]) {
    let (p, g) = match decay {
        Decay::Coupled => (p, g + p * factor),
        Decay::Decoupled => (p * factor, g),
    };
    let m = m + (g - m) * take1;
    let v = v * keep2 + g * g * take2;
    let top = top.map_or(v, |top| top.max(v));
    (p - m / (top.sqrt() * unbias + eps) * lr, [m, v, top])
}
