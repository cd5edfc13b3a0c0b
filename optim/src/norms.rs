//! Sums of squares, norms and totals, on the device.

use numcore::{
    DType, Result, Runtime, Scalar, Shape, Tensor,
    ops::{Apply, JoinOps, PointwiseOps, Reduce, ReduceOps, ScalarList, ViewOps, cat},
    pointwise::{
        Program, Widened,
        standard::{SQUARES, ZERO_IF_FINITE},
    },
};

/// The dtype in which norms of a dtype are computed: `f64` for `f64`, `f32` for all others.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { dtype } else { DType::F32 }
}

fn sum<R: Runtime>(x: &Tensor<R>, program: &Widened) -> Result<Tensor<R>> {
    let to = Shape::new(&vec![1; x.shape().rank()])?;
    Tensor::apply1(Reduce::sum_of(program.of(x.dtype()).clone(), ScalarList::new(), to), &[x])
}

/// The sum of squares of a floating tensor, as one element with the tensor's rank. Half precision is upcast to `f32` as
/// it is read.
pub fn sum_of_squares<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    sum(x, &SQUARES)
}

/// The sum of the single output of a program over operands of one shape: `[1]`.
pub fn sum_of<R: Runtime>(program: &Program, xs: &[&Tensor<R>], scalars: &[Scalar]) -> Result<Tensor<R>> {
    let to = Shape::new(&vec![1; xs.first().map_or(0, |x| x.shape().rank())])?;
    Tensor::apply1(Reduce::sum_of(program.clone(), scalars.into(), to), xs)?.reshape([1])
}

/// The widest floating type that the runtime computes, in which totals are: `f64`, else `f32`.
pub fn widest<R: Runtime>(rt: &R) -> DType {
    if rt.capabilities().compute.contains(&DType::F64) { DType::F64 } else { DType::F32 }
}

/// The sum of `rows`, each of up to `count` numbers, in the [widest] type: `[count]`. The order of additions depends on
/// the number of rows alone.
pub fn total<R: Runtime>(rt: &R, rows: &[Tensor<R>], count: usize) -> Result<Tensor<R>> {
    let (wide, Some(first)) = (widest(rt), rows.first()) else { return Tensor::zeros(rt, [count], widest(rt)) };
    let is_plain = |x: &Tensor<R>| x.dtype() == first.dtype() && x.shape().numel() == count;
    let plain = match rows.iter().all(is_plain) {
        true => rows.to_vec(),
        false => {
            let padded = |x: &Tensor<R>| x.to_dtype(wide)?.pad(&[(0, count - x.shape().numel())], 0.0);
            rows.iter().map(padded).collect::<Result<_>>()?
        }
    };
    cat(&plain.iter().collect::<Vec<_>>(), 0)?.to_dtype(wide)?.reshape([rows.len(), count])?.sum(&[0])
}

/// One element with the rank of a floating tensor: 0 if all of the tensor's elements are finite, NaN otherwise.
pub fn zero_if_finite<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    sum(x, &ZERO_IF_FINITE)
}
