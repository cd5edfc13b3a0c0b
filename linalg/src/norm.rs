//! Norms of vectors and matrices.

use autograd::Var;
use numcore::{
    Error, Result, Runtime,
    ops::{Apply, PointwiseOps, ReduceOps},
};

use crate::{host::axes, svdvals};

/// A norm of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixNorm {
    /// The square root of the sum of squares.
    Frobenius,
    /// The sum of the singular values.
    Nuclear,
    /// The largest singular value.
    Spectral,
    /// The largest sum of absolute values of a column.
    One,
    /// The largest sum of absolute values of a row.
    Infinity,
}

/// The norms of matrices: `a: [.., M, N]` to `[..]`.
///
/// # Errors
/// Fails if `a` has fewer than two axes or, for norms by singular values, elements that are not finite.
#[track_caller]
pub fn matrix_norm<R: Runtime>(a: &Var<R>, norm: MatrixNorm) -> Result<Var<R>> {
    axes("matrix_norm", &a.spec().shape)?;
    match norm {
        MatrixNorm::Frobenius => a.norm(&[-2, -1]),
        MatrixNorm::Nuclear => svdvals(a)?.sum(&[-1]),
        MatrixNorm::Spectral => svdvals(a)?.amax(&[-1]),
        MatrixNorm::One => a.abs()?.sum(&[-2])?.amax(&[-1]),
        MatrixNorm::Infinity => a.abs()?.sum(&[-1])?.amax(&[-1]),
    }
}

/// The norms of vectors of an order: `(Σ |xᵢ|ᵖ)^(1/p)` over `axes`, which are removed. With `p` infinite they are the
/// largest absolute values, with -∞ the smallest, with 0 the numbers of elements that are not 0. Values are divided by
/// the largest one first, so that powers of positive orders do not overflow. For orders above 1 the gradient of zeros
/// is 0.
///
/// # Errors
/// Fails if `order` is not a number, or there is no such axis. Fails too if a norm of an order other than 0, 1 and 2
/// has no elements.
#[track_caller]
pub fn vector_norm<R: Runtime>(x: &Var<R>, order: f64, axes: &[isize]) -> Result<Var<R>> {
    let absolute = x.abs()?;
    match order {
        p if p.is_nan() => Err(Error::argument("vector_norm", "the order of a norm is a number")),
        f64::INFINITY => absolute.amax(axes),
        f64::NEG_INFINITY => absolute.amin(axes),
        0.0 => absolute.ne(0.0)?.to_dtype(x.spec().dtype)?.sum(axes),
        1.0 => absolute.sum(axes),
        2.0 => x.norm(axes),
        p => {
            // A factor that the norm is homogeneous in: constant, so the gradient does not see it.
            let largest = absolute.detach().amax_keepdim(axes)?;
            let scale = largest.where_cond(&largest.gt(0.0)?, 1.0)?;
            let scale = scale.where_cond(&scale.lt(f64::INFINITY)?, 1.0)?;
            let sum = absolute.div(&scale)?.pow(p)?.sum_keepdim(axes)?;
            let is_some = sum.ne(0.0)?;
            let norm = sum.where_cond(&is_some, 1.0)?.pow(1.0 / p)?.mul(&scale)?;
            norm.where_cond(&is_some, 0.0)?.sum(axes)
        }
    }
}
