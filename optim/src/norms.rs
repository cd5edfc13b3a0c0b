//! Sums of squares and norms, on the device.

use numcore::{
    DType, Result, Runtime, Shape, Tensor,
    ops::{Apply, Reduce, ScalarList},
    pointwise::{
        Widened,
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

/// One element with the rank of a floating tensor: 0 if all of the tensor's elements are finite, NaN otherwise.
pub fn zero_if_finite<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    sum(x, &ZERO_IF_FINITE)
}
