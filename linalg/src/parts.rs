//! Steps that several factorizations and their gradients have in common.

use autograd::Var;
use faer::{MatMut, MatRef};
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{Apply, PointwiseOps, ViewOps},
};

use crate::host::Real;

/// A matrix whose elements are finite, which iterations need.
pub(crate) fn finite<T: Real>(a: MatRef<'_, T>) -> Result<MatRef<'_, T>, String> {
    let is_finite = (0..a.nrows()).all(|i| (0..a.ncols()).all(|j| a[(i, j)].wide().is_finite()));
    if is_finite { Ok(a) } else { Err("has elements that are not finite".into()) }
}

/// Makes the largest element of each column of `vectors` positive, and changes the sign of the same column of `beside`.
pub(crate) fn positive<T: Real>(vectors: &mut MatMut<'_, T>, mut beside: Option<&mut MatMut<'_, T>>) {
    for k in 0..vectors.ncols() {
        // The first of equal ones.
        let larger = |largest: f64, i: usize| {
            let value = vectors[(i, k)].wide();
            if value.abs() > largest.abs() { value } else { largest }
        };
        if (0..vectors.nrows()).fold(0.0, larger) < 0.0 {
            negate(vectors, k);
            beside.iter_mut().for_each(|beside| negate(beside, k));
        }
    }
}

/// Changes the signs of a column.
pub(crate) fn negate<T: Real>(matrix: &mut MatMut<'_, T>, column: usize) {
    (0..matrix.nrows()).for_each(|i| matrix[(i, column)] = T::nearest(-matrix[(i, column)].wide()));
}

/// Square matrices with these diagonals: `[.., N]` to `[.., N, N]`.
pub(crate) fn diagonal<R: Runtime>(values: &Var<R>) -> Result<Var<R>> {
    let spec = values.spec();
    let n = spec.shape[spec.shape.rank() - 1];
    values.unsqueeze(-1)?.mul(&Var::new(Tensor::eye(values.runtime(), n, spec.dtype)?))
}

/// The differences `wⱼ − wᵢ` of `w: [.., N]`, and infinity on the diagonal, by which nothing is left.
pub(crate) fn gaps<R: Runtime>(w: &Var<R>) -> Result<Var<R>> {
    let n = w.spec().shape[w.spec().shape.rank() - 1];
    let own = Var::new(Tensor::eye(w.runtime(), n, DType::I64)?.to_dtype(DType::Bool)?);
    let infinite = Var::new(Tensor::full(w.runtime(), [], w.spec().dtype, f64::INFINITY)?);
    infinite.where_cond(&own, &w.unsqueeze(-2)?.sub(&w.unsqueeze(-1)?)?)
}

/// The sum of two values, either of which may be missing.
pub(crate) fn sum<R: Runtime>(a: Option<Var<R>>, b: Option<Var<R>>) -> Result<Option<Var<R>>> {
    match (a, b) {
        (Some(a), Some(b)) => a.add(&b).map(Some),
        (a, b) => Ok(a.or(b)),
    }
}
