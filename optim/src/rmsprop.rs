//! RMSprop: step sizes from a running mean of squared gradients.

use numcore::pointwise::{Expr, Program};

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars};

config! {
    /// Hyper-parameters of [`RmsProp`], with PyTorch's names where it has them.
    RmsPropConfig = "RMSprop" {
        /// The learning rate `γ`.
        lr: f64 = 1e-2, NonNegative;
        /// The decay rate `α` of the running means.
        alpha: f64 = 0.99, NonNegative;
        /// The constant `ε` added to the root of the mean.
        eps: f64 = 1e-8, NonNegative;
        /// The weight decay coefficient `λ`: `λθ` is added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// The momentum `μ`; with 0 there is no momentum buffer.
        momentum: f64 = 0.0, NonNegative;
        /// True to divide by the root of the variance instead of the mean of squares.
        centered: bool = false, Any;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// RMSprop. With `g ← g + λθ`: `v ← αv + (1 − α)g²`; `d = g/(√v + ε)`, or centered with `a ← αa + (1 − α)g`,
/// `d = g/(√(v − a²) + ε)`; `b ← μb + d`, `θ ← θ − γb`, without momentum `θ ← θ − γd`.
///
/// Hinton, *Neural Networks for Machine Learning*, lecture 6a, 2012; centered: Graves, *Generating Sequences With
/// Recurrent Neural Networks*, 2013.
pub type RmsProp<R> = FlatOptimizer<R, RmsPropConfig>;

type RmsNumbers<'b> = [Expr<'b>; 6];

/// The direction before momentum, and the new running means.
fn direction<'b>(
    [p, g, v]: [Expr<'b>; 3],
    mean: Option<Expr<'b>>,
    [_, keep, take, eps, decay, _]: RmsNumbers<'b>,
) -> (Expr<'b>, [Expr<'b>; 2]) {
    let g = g + p * decay;
    let v = v * keep + g * g * take;
    let mean = mean.map(|a| a + (g - a) * take);
    let spread = mean.map_or(v, |a| v - a * a);
    (g / (spread.sqrt() + eps), [v, mean.unwrap_or(v)])
}

impl Elementwise for RmsPropConfig {
    fn states(&self) -> Vec<StateSpec> {
        let kept = [("square_avg", true), ("momentum_buffer", self.momentum > 0.0), ("grad_avg", self.centered)];
        // Centered means are subtracted.
        let state = |name| if self.centered { StateSpec::zeros(name).exact() } else { StateSpec::zeros(name) };
        kept.iter().filter(|(_, is)| *is).map(|(name, _)| state(*name)).collect()
    }

    fn program(&self, form: UpdateForm) -> Program {
        let form = form.maximizing(self.maximize);
        match (self.momentum > 0.0, self.centered) {
            (false, false) => form.program("rmsprop", |p, g, [v], s| {
                let (d, [v, _]) = direction([p, g, v], None, s);
                (p - d * s[0], [v])
            }),
            (false, true) => form.program("rmsprop_centered", |p, g, [v, a], s| {
                let (d, [v, a]) = direction([p, g, v], Some(a), s);
                (p - d * s[0], [v, a])
            }),
            (true, false) => form.program("rmsprop_momentum", |p, g, [v, b], s| {
                let (d, [v, _]) = direction([p, g, v], None, s);
                let b = b * s[5] + d;
                (p - b * s[0], [v, b])
            }),
            (true, true) => form.program("rmsprop_centered_momentum", |p, g, [v, b, a], s| {
                let (d, [v, a]) = direction([p, g, v], Some(a), s);
                let b = b * s[5] + d;
                (p - b * s[0], [v, b, a])
            }),
        }
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        scalars([now.lr, self.alpha, 1.0 - self.alpha, self.eps, self.weight_decay, self.momentum])
    }
}
