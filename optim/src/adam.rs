//! Adam and AMSGrad; the program that AdamW shares.

use numcore::pointwise::Program;

use crate::{Elementwise, FlatOptimizer, Form, Now, Scalars, State, config, scalars};

config! {
    /// Hyper-parameters of [`Adam`].
    AdamConfig = "Adam" {
        /// Step size `γ`.
        lr: f64 = 1e-3, NonNegative;
        /// `β₁`, `β₂`: how much of the running means is kept.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// `ε`, added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// `λ`: what of the parameter is added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// Divides by the largest second moment so far (Reddi et al. 2018).
        amsgrad: bool = false, Any;
        /// Climbs instead of descending.
        maximize: bool = false, Any;
    }
}

/// Adam. With `g ← g + λθ`:
///
/// `m ← β₁m + (1 − β₁)g`, `v ← β₂v + (1 − β₂)g²`, `θ ← θ − γ/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε)`; AMSGrad takes the largest `v` so far.
///
/// Kingma and Ba, *Adam: A Method for Stochastic Optimization*, 2015. Reddi, Kale and Kumar, *On the Convergence of Adam and
/// Beyond*, 2018.
pub type Adam<R> = FlatOptimizer<R, AdamConfig>;

impl Elementwise for AdamConfig {
    fn states(&self) -> Vec<State> {
        moments(self.amsgrad)
    }

    fn program(&self, form: Form) -> Program {
        Formula { name: "adam", decoupled: false, amsgrad: self.amsgrad, maximize: self.maximize }.program(form)
    }

    fn scalars(&self, now: Now) -> Scalars {
        numbers(self.betas, self.eps, self.weight_decay, now)
    }
}

/// What Adam and AdamW keep.
pub(crate) fn moments(amsgrad: bool) -> Vec<State> {
    let names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
    names[..2 + usize::from(amsgrad)].iter().map(|n| State::zeros(n)).collect()
}

pub(crate) fn numbers([b1, b2]: [f64; 2], eps: f64, weight_decay: f64, now: Now) -> Scalars {
    let t = now.step as f64;
    scalars([now.lr, b1, b2, eps, weight_decay, 1.0 - b1.powf(t), (1.0 - b2.powf(t)).sqrt()])
}

/// Adam's formula with either weight decay.
pub(crate) struct Formula {
    pub(crate) name: &'static str,
    /// Shrinks the parameter itself instead of adding to the gradient.
    pub(crate) decoupled: bool,
    pub(crate) amsgrad: bool,
    pub(crate) maximize: bool,
}

impl Formula {
    pub(crate) fn program(self, form: Form) -> Program {
        use numcore::pointwise::Expr;
        fn step<'b>(
            how: &Formula,
            (p, g, m, v): (Expr<'b>, Expr<'b>, Expr<'b>, Expr<'b>),
            top: Option<Expr<'b>>,
            [lr, b1, b2, eps, decay, c1, c2]: [Expr<'b>; 7],
        ) -> (Expr<'b>, [Expr<'b>; 2], Expr<'b>) {
            let g = if how.maximize { -g } else { g };
            let (p, g) = if how.decoupled { (p * (1.0 - lr * decay), g) } else { (p, g + p * decay) };
            let m = m + (g - m) * (1.0 - b1);
            let v = v * b2 + g * g * (1.0 - b2);
            let top = top.map_or(v, |top| top.max(v));
            (p - m / (top.sqrt() * c2.recip() + eps) * (lr / c1), [m, v], top)
        }
        if self.amsgrad {
            return form.program(self.name, |p, g, [m, v, top], s| {
                let (p, [m, v], top) = step(&self, (p, g, m, v), Some(top), s);
                (p, [m, v, top])
            });
        }
        form.program(self.name, |p, g, [m, v], s| {
            let (p, moments, _) = step(&self, (p, g, m, v), None, s);
            (p, moments)
        })
    }
}
