//! Schedule-free AdamW and SGD: steps whose average is evaluated take the place of a learning-rate schedule.

use numcore::pointwise::{Expr, Program};

use crate::{Elementwise, FlatOptimizer, Scalars, StateSpec, StepContext, UpdateForm, scalars, state::AVERAGE};

config! {
    /// Hyper-parameters of [`ScheduleFreeAdamW`], with the names and defaults of its authors' code.
    ScheduleFreeAdamWConfig = "schedule-free AdamW" {
        /// The learning rate `γ`, as large as AdamW's or up to ten times it.
        lr: f64 = 0.0025, NonNegative;
        /// The fraction `β₁` of the average at which gradients are computed, and the decay rate `β₂` of squares.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-8, NonNegative;
        /// The weight decay `λ`: `λθ` is added to the direction.
        weight_decay: f64 = 0.0, NonNegative;
        /// The number of steps `w` over which the learning rate increases linearly to `γ`.
        warmup_steps: u32 = 0, Any;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

config! {
    /// Hyper-parameters of [`ScheduleFreeSgd`], with the names and defaults of its authors' code.
    ScheduleFreeSgdConfig = "schedule-free SGD" {
        /// The learning rate `γ`, ten to fifty times that of SGD with momentum.
        lr: f64 = 1.0, NonNegative;
        /// The fraction `β` of the average at which gradients are computed.
        momentum: f64 = 0.9, Unit;
        /// The weight decay `λ`: `λθ` is added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// The number of steps `w` over which the learning rate increases linearly to `γ`.
        warmup_steps: u32 = 0, Any;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Schedule-free AdamW. Parameters `θ` are trained, and their average `x`, the state `average`, is evaluated:
/// [`EvaluationWeights::of`](crate::EvaluationWeights::of), or `WeightAveraging::of_optimizer` in the training loop.
///
/// With `v ← β₂v + (1 − β₂)g²`, `d = g/(√(v/(1 − β₂ᵗ)) + ε) + λθ`, `γₜ = γ min(1, t/w)` and
/// `cₜ = min(1, t/w)²/Σᵢ min(1, i/w)²`: `z ← z − γₜd`, `x ← x + cₜ(z − x)`, `θ = (1 − β₁)z + β₁x`. The state `z` is
/// computed from `θ` and `x`, so memory is that of AdamW. Give it no schedule: warmup is an option of the rule, because
/// weights of the average depend on it.
///
/// Defazio et al., *The Road Less Scheduled*, 2024.
#[doc(alias("AdamWScheduleFree"))]
pub type ScheduleFreeAdamW<R> = FlatOptimizer<R, ScheduleFreeAdamWConfig>;

/// Schedule-free SGD: the steps of [`ScheduleFreeAdamW`] with the direction `d = g + λθ`.
///
/// Defazio et al., *The Road Less Scheduled*, 2024.
#[doc(alias("SGDScheduleFree"))]
pub type ScheduleFreeSgd<R> = FlatOptimizer<R, ScheduleFreeSgdConfig>;

/// The new parameter and average, given the old ones and the direction.
fn step<'b>([p, x, d]: [Expr<'b>; 3], [first, apart, lr, near, take, ahead]: [Expr<'b>; 6]) -> [Expr<'b>; 2] {
    // The average begins at the parameter.
    let x = x + (p - x) * first;
    // This is z − x after the step.
    let z = (p - x) * apart - d * lr;
    [p - d * near + z * ahead, x + z * take]
}

/// The numbers of [`step`], with the factor `β` and `warmup` steps.
fn numbers(beta: f64, warmup: u32, now: StepContext) -> [f64; 6] {
    let (t, warmup) = (now.step as f64, f64::from(warmup));
    let squares = |n: f64| n * (n + 1.0) * (2.0 * n + 1.0) / 6.0;
    let (rate, sum) = match t < warmup {
        true => (t / warmup, squares(t) / (t * t)),
        false => (1.0, squares(warmup) / (warmup * warmup).max(1.0) + t - warmup),
    };
    let (lr, take) = (now.lr * rate, 1.0 / sum);
    [f64::from(u8::from(now.step == 1)), 1.0 / (1.0 - beta), lr, (1.0 - beta) * lr, take, beta * take]
}

impl Elementwise for ScheduleFreeAdamWConfig {
    fn states(&self) -> Vec<StateSpec> {
        // The state `z` is computed from the parameter's distance to the average, times `1/(1 − β₁)`.
        vec![StateSpec::zeros(AVERAGE).exact(), StateSpec::zeros("exp_avg_sq")]
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.maximizing(self.maximize).program(
            "schedule_free_adamw",
            |p, g, [x, v], [first, apart, lr, near, take, ahead, keep2, take2, unbias, eps, decay]| {
                let v = v * keep2 + g * g * take2;
                let d = g / (v.sqrt() * unbias + eps) + p * decay;
                let [p, x] = step([p, x, d], [first, apart, lr, near, take, ahead]);
                (p, [x, v])
            },
        )
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let [b1, b2] = self.betas;
        let [first, apart, lr, near, take, ahead] = numbers(b1, self.warmup_steps, now);
        let unbias = 1.0 / (1.0 - b2.powf(now.step as f64)).sqrt();
        scalars([first, apart, lr, near, take, ahead, b2, 1.0 - b2, unbias, self.eps, self.weight_decay])
    }
}

impl Elementwise for ScheduleFreeSgdConfig {
    fn states(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros(AVERAGE).exact()]
    }

    fn program(&self, form: UpdateForm) -> Program {
        form.maximizing(self.maximize).program(
            "schedule_free_sgd",
            |p, g, [x], [first, apart, lr, near, take, ahead, decay]| {
                let [p, x] = step([p, x, g + p * decay], [first, apart, lr, near, take, ahead]);
                (p, [x])
            },
        )
    }

    fn scalars(&self, now: StepContext) -> Scalars {
        let [first, apart, lr, near, take, ahead] = numbers(self.momentum, self.warmup_steps, now);
        scalars([first, apart, lr, near, take, ahead, self.weight_decay])
    }
}
