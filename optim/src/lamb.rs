//! LAMB: Adam's direction, with a trust ratio for each layer.

use std::sync::LazyLock;

use numcore::{DType, Result, Runtime, TensorMut, ops::PointwiseOps, pointwise::Program};

use crate::{FlatOptimizer, StateSpec, StepContext, UpdateMemory, UpdateRule, norms::sum_of_squares};

config! {
    /// Hyper-parameters of [`Lamb`], with PyTorch's names where it has them.
    LambConfig = "LAMB" {
        /// The learning rate `γ`.
        lr: f64 = 1e-3, NonNegative;
        /// The decay rates `β₁`, `β₂` of the running means.
        betas: [f64; 2] = [0.9, 0.999], Unit;
        /// The constant `ε` added to the root of the second moment.
        eps: f64 = 1e-6, NonNegative;
        /// The weight decay coefficient `λ`: `λθ` is added to the direction.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// LAMB. With Adam's `m` and `v`, for each parameter:
///
/// `r = m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε) + λθ`, `θ ← θ − γ φ r` with the trust ratio `φ = ‖θ‖/‖r‖` (1 where either is
/// 0).
///
/// You et al., *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*, 2020.
pub type Lamb<R> = FlatOptimizer<R, LambConfig>;

/// The program of the direction: inputs `[m, v, (r), g, θ]`, outputs `[m, v, r]`.
static DIRECTION: LazyLock<Program> = LazyLock::new(|| {
    Program::new("lamb_direction", |[m, v, _, g, p], [take1, keep2, take2, eps, decay, unbias1, unbias2]| {
        let m = m + (g - m) * take1;
        let v = v * keep2 + g * g * take2;
        [m, v, m * unbias1 / (v.sqrt() * unbias2 + eps) + p * decay]
    })
});

static STEP: LazyLock<Program> = LazyLock::new(|| {
    Program::new("lamb_step", |[p, r, p_squares, r_squares], [lr]| {
        let both = p_squares.gt(0.0) & r_squares.gt(0.0);
        [p - r * (both.select((p_squares / r_squares).sqrt(), 1.0) * lr)]
    })
});

impl UpdateRule for LambConfig {
    type Kernel = ();

    fn tensors(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros("exp_avg"), StateSpec::zeros("exp_avg_sq")]
    }

    fn kernel(&self, _: Option<DType>) -> Result<()> {
        Ok(())
    }

    fn update<R: Runtime>(&self, (): &(), now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        let ([b1, b2], t) = (self.betas, now.step as f64);
        let g = memory.gradient()?;
        let g = if self.maximize { g.neg()? } else { g };
        let p = memory.weight()?;
        let mut r = TensorMut::alloc(&memory.runtime(), memory.shape(), memory.working())?;
        let (unbias1, unbias2) = (1.0 / (1.0 - b1.powf(t)), 1.0 / (1.0 - b2.powf(t)).sqrt());
        let numbers = [1.0 - b1, b2, 1.0 - b2, self.eps, self.weight_decay, unbias1, unbias2].map(Into::into);
        memory.update_states(0..2, Some(&mut r), &DIRECTION, &[&g, &p], &numbers)?;
        let r = r.freeze()?;
        let (p_squares, r_squares) = (sum_of_squares(&p)?, sum_of_squares(&r)?);
        drop(p);
        memory.update_weight(&STEP, &[&r, &p_squares, &r_squares], &[now.lr.into()])
    }
}
