//! A check for infinities and NaNs in gradients that are still writable.

use numcore::{
    DType, Result, Runtime, TensorMut,
    ops::{Input, ReduceOps, compute},
    pointwise::standard::ZERO_IF_FINITE,
};

/// Tells whether every element is finite; waits for the device. Half precision is checked in `f32`, other types as they
/// are.
pub(crate) fn is_finite<R: Runtime>(x: &TensorMut<R>) -> Result<bool> {
    let dtype = if x.dtype().is_half() { DType::F32 } else { x.dtype() };
    let mut zeros = TensorMut::alloc(x.runtime(), *x.shape(), dtype)?;
    compute(x.runtime(), ZERO_IF_FINITE.of(x.dtype()), &[Input::Memory(x)], &[], &mut [&mut zeros])?;
    Ok(zeros.freeze()?.sum_all()?.item()?.is_finite())
}
