//! Muon: momentum of matrices, orthogonalized.

use std::sync::LazyLock;

use numcore::{
    DType, Result, Runtime, Tensor, TensorMut,
    ops::{MatmulOps, PointwiseOps, Spec, ViewOps},
    pointwise::Program,
};

use crate::{
    FlatOptimizer, HyperNumbers, HyperValue, StateSpec, StepContext, UpdateMemory, UpdateRule, norms::sum_of_squares,
};

/// The dependence of Muon's step size on a matrix of `a` rows and `b` columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdjustLr {
    /// The factor `√max(1, a/b)` (Jordan 2024).
    #[default]
    Original,
    /// The factor `0.2 √max(a, b)`, with which updates are as large as AdamW's, so that its step size can be reused
    /// (Liu et al. 2025).
    MatchRmsAdamW,
    /// The factor `√(a/b)` (Bernstein 2025).
    SpectralUnclamped,
}

impl AdjustLr {
    const ALL: [AdjustLr; 3] = [AdjustLr::Original, AdjustLr::MatchRmsAdamW, AdjustLr::SpectralUnclamped];

    fn factor(self, a: f64, b: f64) -> f64 {
        match self {
            AdjustLr::Original => (a / b).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamW => 0.2 * a.max(b).sqrt(),
            AdjustLr::SpectralUnclamped => (a / b).sqrt(),
        }
    }
}

impl HyperValue for AdjustLr {
    fn numbers(&self) -> HyperNumbers {
        f64::from(*self as u8).numbers()
    }
    fn assign(&mut self, numbers: &[f64]) -> bool {
        let found = AdjustLr::ALL.into_iter().find(|a| a.numbers().as_slice() == numbers);
        *self = found.unwrap_or(*self);
        found.is_some()
    }
}

config! {
    /// Hyper-parameters of [`Muon`], with PyTorch's names where it has them.
    MuonConfig = "Muon" {
        /// The learning rate `γ`.
        lr: f64 = 1e-3, NonNegative;
        /// The decoupled weight decay `λ`: parameters shrink by `λ` times the step size.
        weight_decay: f64 = 0.1, NonNegative;
        /// The fraction `μ` of the momentum that is kept.
        momentum: f64 = 0.95, NonNegative;
        /// True to use Nesterov momentum.
        nesterov: bool = true, Any;
        /// The coefficients `a`, `b`, `c` of the iteration.
        ns_coefficients: [f64; 3] = [3.4445, -4.7750, 2.0315], Any;
        /// The lower bound of the norm by which the momentum is divided first.
        eps: f64 = 1e-7, NonNegative;
        /// The number of iterations.
        ns_steps: u32 = 5, Any;
        /// The dependence of the step size on the shape of the matrix.
        adjust_lr: AdjustLr = AdjustLr::Original, Any;
        /// True if the iteration's matmuls run on `bf16` tensors, as matrix units require; an update is then rounded a
        /// little more. If false, they are `f32` matmuls of values rounded to `bf16` between iterations.
        bf16_products: bool = false, Any;
    }
}

/// Muon, for matrices only. Use another optimizer for other parameters, and [`Combined`](crate::Combined) for both.
///
/// `b ← μb + (1 − μ)g`; `u = μb + (1 − μ)g` with Nesterov's momentum, else `b`; `X = u/‖u‖`. Then `ns_steps` times
/// `A = XXᵀ`, `X ← aX + (bA + cA²)X`, which brings the singular values to about 1. `θ ← (1 − γλ)θ − γ f X`, with `f` by
/// [`AdjustLr`].
///
/// Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024. Liu et al., *Muon is Scalable for
/// LLM Training*, 2025.
pub type Muon<R> = FlatOptimizer<R, MuonConfig>;

/// The program of the momentum: inputs `[b, (u), g]`, outputs `[b, u]`.
static MOMENTUM: LazyLock<[Program; 2]> = LazyLock::new(|| {
    [false, true].map(|nesterov| {
        Program::new("muon_momentum", |[b, _, g], [take]| {
            let b = b + (g - b) * take;
            [b, if nesterov { b - (b - g) * take } else { b }]
        })
    })
});

static NORMALISE: LazyLock<Program> = LazyLock::new(|| {
    Program::new("muon_normalise", |[x, squares], [eps]| {
        let norm = squares.sqrt().cast(DType::BF16).cast(DType::F32).max(eps);
        [(x.cast(DType::F32) / norm).cast(DType::BF16)]
    })
});

/// The program of `ax + by`, rounded to `bf16` once.
static BLEND: LazyLock<Program> = LazyLock::new(|| {
    Program::new("muon_blend", |[x, y], [a, b]| [(x.cast(DType::F32) * a + y.cast(DType::F32) * b).cast(DType::BF16)])
});

static STEP: LazyLock<Program> =
    LazyLock::new(|| Program::new("muon_step", |[p, x], [shrink, lr]| [p * shrink - x.cast_like(p) * lr]));

impl MuonConfig {
    /// Brings the singular values of `u: [A, B]` to about 1; the result is `bf16`.
    fn orthogonal<R: Runtime>(&self, u: &Tensor<R>) -> Result<Tensor<R>> {
        let tall = u.dims()[0] > u.dims()[1];
        let x = u.to_dtype(DType::BF16)?;
        let x = if tall { x.t()? } else { x };
        let [a, b, c] = self.ns_coefficients;
        let mut x = x.apply_program(&NORMALISE, &[&sum_of_squares(&x)?], &[self.eps.into()])?;
        for _ in 0..self.ns_steps {
            let gram = self.product(&x, &x.t()?)?.to_dtype(DType::BF16)?;
            let poly = gram.apply_program(&BLEND, &[&self.product(&gram, &gram)?], &[b.into(), c.into()])?;
            x = x.apply_program(&BLEND, &[&self.product(&poly, &x)?], &[a.into(), 1.0.into()])?;
        }
        if tall { x.t() } else { Ok(x) }
    }

    fn product<R: Runtime>(&self, a: &Tensor<R>, b: &Tensor<R>) -> Result<Tensor<R>> {
        if self.bf16_products {
            return a.matmul(b);
        }
        a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?)
    }
}

impl UpdateRule for MuonConfig {
    type Kernel = ();

    fn tensors(&self) -> Vec<StateSpec> {
        vec![StateSpec::zeros("momentum_buffer")]
    }

    fn kernel(&self, _: Option<DType>) -> Result<()> {
        Ok(())
    }

    fn refuses(&self, spec: &Spec) -> Option<String> {
        let matrix = spec.shape.rank() == 2;
        (!matrix)
            .then(|| format!("has shape {}; only matrices can be orthogonal, give it to another optimizer", spec.shape))
    }

    fn update<R: Runtime>(&self, (): &(), now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        let shape = memory.shape();
        let g = memory.gradient()?;
        let mut u = TensorMut::alloc(&memory.runtime(), shape, memory.working())?;
        let momentum = &MOMENTUM[usize::from(self.nesterov)];
        memory.update_states(0..1, Some(&mut u), momentum, &[&g], &[(1.0 - self.momentum).into()])?;
        let x = self.orthogonal(&u.freeze()?)?;
        let lr = now.lr * self.adjust_lr.factor(shape[0] as f64, shape[1] as f64);
        memory.update_weight(&STEP, &[&x], &[(1.0 - now.lr * self.weight_decay).into(), lr.into()])
    }
}
