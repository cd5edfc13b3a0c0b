//! Whether a gradient that may be written still is finite.

use numcore::{
    DType, Result, Runtime, TensorMut,
    ops::{Input, ReduceOps, compute},
    pointwise::standard::ZERO_IF_FINITE,
};

/// Whether every element is; waits for the device. Half precision is upcast, all others are looked at as they are.
pub(crate) fn is_finite<R: Runtime>(x: &TensorMut<R>) -> Result<bool> {
    let dtype = if x.dtype().is_half() { DType::F32 } else { x.dtype() };
    let mut zeros = TensorMut::alloc(x.runtime(), *x.shape(), dtype)?;
    compute(x.runtime(), ZERO_IF_FINITE.of(x.dtype()), &[Input::Memory(x)], &[], &mut [&mut zeros])?;
    Ok(zeros.freeze()?.sum(&[], false)?.item()?.is_finite())
}
