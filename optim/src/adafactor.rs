//! Adafactor: second moments of matrices by their row and column means.

use std::sync::LazyLock;

use numcore::{
    DType, Result, Runtime, Shape, Tensor,
    ops::{PointwiseOps, ReduceOps},
    pointwise::Program,
};

use crate::{FlatOptimizer, StateSpec, StepContext, UpdateMemory, UpdateRule, memory::LERP, norms::sum_of_squares};

config! {
    /// Hyper-parameters of [`Adafactor`], with PyTorch's names where it has them.
    AdafactorConfig = "Adafactor" {
        /// The largest relative step size `ρ`.
        lr: f64 = 1e-2, NonNegative;
        /// The exponent `τ` in `β₂ₜ = 1 − t^τ`.
        beta2_decay: f64 = -0.8, NonPositive;
        /// The lower bound `ε₁` of second moments; by default the machine epsilon of the dtype of updates.
        eps1: Option<f64> = None, NonNegative;
        /// The lower bound `ε₂` of a parameter's root mean square.
        eps2: f64 = 1e-3, NonNegative;
        /// The threshold `d` of an update's root mean square, above which the update is clipped.
        d: f64 = 1.0, AtLeastOne;
        /// The decoupled weight decay `λ`: parameters shrink by `λ` times the step size.
        weight_decay: f64 = 0.0, NonNegative;
        /// True to maximize the objective instead of minimizing it.
        maximize: bool = false, Any;
    }
}

/// Adafactor, in PyTorch's variant. With `RMS(x) = ‖x‖/√n`, `ρₜ = min(ρ, 1/√t)`, `w = t^τ`:
///
/// `α = max(ε₂, RMS(θ)) ρₜ`, `θ ← (1 − ρλ)θ`. For a matrix (the last two axes), `r ← r + w(mean(g²) of rows − r)`, `c`
/// likewise of columns, `v = rc / max(mean(r), ε₁)`; for a vector `v ← v + w(g² − v)`. Then `u = g/√max(v, ε₁²)`,
/// `θ ← θ − α u / max(1, RMS(u)/d)`.
///
/// Shazeer and Stern, *Adafactor: Adaptive Learning Rates with Sublinear Memory Cost*, 2018.
pub type Adafactor<R> = FlatOptimizer<R, AdafactorConfig>;

const NONE: fn(&Shape) -> Shape = |_| Shape::from([0]);

/// The parameter's shape with `axis` (from the end) of size 1; no elements for vectors.
fn without(shape: &Shape, axis: usize) -> Shape {
    if shape.rank() < 2 { NONE(shape) } else { shape.with(shape.rank() - axis, 1) }
}

static LERP_SQUARE: LazyLock<Program> =
    LazyLock::new(|| Program::new("lerp_square_into", |[v, g], [w]| [v + (g * g - v) * w]));
static OF_VECTOR: LazyLock<Program> =
    LazyLock::new(|| Program::new("adafactor_vector", |[g, v], [least]| [g * v.max(least).rsqrt()]));
static OF_MATRIX: LazyLock<Program> = LazyLock::new(|| {
    Program::new("adafactor_matrix", |[g, row, column, mean], [eps1, least]| {
        [g * (row * column / mean.max(eps1)).max(least).rsqrt()]
    })
});
static STEP: LazyLock<Program> = LazyLock::new(|| {
    Program::new("adafactor_step", |[p, u, p_squares, u_squares], [rho, shrink, eps2, inverse_d, inverse_n]| {
        let alpha = (p_squares * inverse_n).sqrt().max(eps2) * rho;
        let size = (u_squares * inverse_n).sqrt() * inverse_d;
        [p * shrink - u * (alpha / size.max(1.0))]
    })
});

impl AdafactorConfig {
    fn eps1(&self, dtype: DType) -> f64 {
        let precision = match dtype {
            DType::F64 => f64::EPSILON,
            _ => f64::from(f32::EPSILON),
        };
        self.eps1.unwrap_or(precision)
    }

    /// The update `u` of a matrix: its second moments are the outer product of row and column means.
    fn of_matrix<R: Runtime>(&self, g: &Tensor<R>, w: f64, memory: &mut UpdateMemory<'_, R>) -> Result<Tensor<R>> {
        for (k, axis) in [(0, -1), (1, -2)] {
            let mean = g.square()?.mean_keepdim(&[axis])?;
            memory.update_states(k..k + 1, None, &LERP, &[&mean], &[w.into()])?;
        }
        let (row, column) = (memory.state(0)?, memory.state(1)?);
        let eps1 = self.eps1(g.dtype());
        g.apply_program(&OF_MATRIX, &[&row, &column, &row.mean_keepdim(&[-2])?], &[eps1.into(), (eps1 * eps1).into()])
    }

    fn of_vector<R: Runtime>(&self, g: &Tensor<R>, w: f64, memory: &mut UpdateMemory<'_, R>) -> Result<Tensor<R>> {
        memory.update_states(2..3, None, &LERP_SQUARE, &[g], &[w.into()])?;
        g.apply_program(&OF_VECTOR, &[&memory.state(2)?], &[self.eps1(g.dtype()).powi(2).into()])
    }
}

impl UpdateRule for AdafactorConfig {
    type Kernel = ();

    /// The running means of squares over a matrix's rows and columns, and the second moments of a vector.
    fn tensors(&self) -> Vec<StateSpec> {
        let vector: fn(&Shape) -> Shape = |s| if s.rank() < 2 { *s } else { NONE(s) };
        let rows: fn(&Shape) -> Shape = |s| without(s, 1);
        let columns: fn(&Shape) -> Shape = |s| without(s, 2);
        vec![
            StateSpec::shaped("row_var", rows),
            StateSpec::shaped("col_var", columns),
            StateSpec::shaped("variance", vector),
        ]
    }

    fn kernel(&self, _: Option<DType>) -> Result<()> {
        Ok(())
    }

    fn update<R: Runtime>(&self, (): &(), now: StepContext, memory: &mut UpdateMemory<'_, R>) -> Result<()> {
        let (n, t) = (memory.shape().numel(), now.step as f64);
        let w = t.powf(self.beta2_decay);
        let g = memory.gradient()?;
        let g = if self.maximize { g.neg()? } else { g };
        let u = if memory.shape().rank() > 1 { self.of_matrix(&g, w, memory)? } else { self.of_vector(&g, w, memory)? };
        let (p_squares, u_squares) = (sum_of_squares(&memory.weight()?)?, sum_of_squares(&u)?);
        let rho = now.lr.min(1.0 / t.sqrt());
        let shrink = 1.0 - now.lr * self.weight_decay;
        let numbers = [rho, shrink, self.eps2, 1.0 / self.d, 1.0 / n as f64].map(Into::into);
        memory.update_weight(&STEP, &[&u, &p_squares, &u_squares], &numbers)
    }
}
