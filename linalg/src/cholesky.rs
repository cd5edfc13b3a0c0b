//! The Cholesky factorization.

use autograd::Var;
use faer::{
    MatMut, MatRef, Side,
    linalg::{cholesky::llt::factor::LltError, solvers::Llt},
};
use numcore::{
    Result, Runtime,
    ops::{Apply, Backprop, Bits, JoinOps, MatmulOps, PointwiseOps, Saves, ViewOps},
};

use crate::{
    Triangle,
    host::{Kernel, Real, apply, square},
    solve_triangular,
};

/// The lower triangle `L` of `A = L Lᵀ`, for symmetric positive definite `a: [.., N, N]`. The lower triangle of `a` is
/// read; the gradient is symmetric.
///
/// # Errors
/// Fails if a matrix is not square, or not positive definite.
#[track_caller]
pub fn cholesky<R: Runtime>(a: &Var<R>) -> Result<Var<R>> {
    square("cholesky", &a.spec().shape)?;
    let [out] = apply(Cholesky, &[a])?;
    Ok(out)
}

struct Cholesky;

impl Kernel for Cholesky {
    const NAME: &'static str = "cholesky";

    fn outs(&self, ins: &[[usize; 2]]) -> Vec<Vec<usize>> {
        vec![ins[0].to_vec()]
    }

    fn run<T: Real>(&self, ins: &[MatRef<'_, T>], outs: &mut [MatMut<'_, T>]) -> Result<(), String> {
        let factor = Llt::new(ins[0], Side::Lower).map_err(|LltError::NonPositivePivot { index }| {
            format!("is not positive definite: pivot {index} is not positive")
        })?;
        outs[0].copy_from_triangular_lower(factor.L());
        Ok(())
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::of(&[0]) }
    }

    // Murray 2016, equation 10: `Ā` is the symmetric part of `L⁻ᵀ Φ(Lᵀ L̄) L⁻¹`, where Φ takes the lower triangle and
    // half of the diagonal.
    fn backward<R: Runtime>(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let (g, l) = (cx.grad()?, cx.output(0)?);
        let product = l.t()?.matmul(&g)?;
        let half = product.tril(0)?.add(&product.tril(-1)?)?.mul(0.5)?;
        let left = solve_triangular(&l, &half, Triangle::LOWER.transposed())?;
        let both = solve_triangular(&l, &left.t()?, Triangle::LOWER.transposed())?;
        cx.give_value(0, &both.add(&both.t()?)?.mul(0.5)?)
    }
}
