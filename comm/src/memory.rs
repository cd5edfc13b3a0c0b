//! Writable memory from a tensor.

use numcore::{Result, Runtime, Tensor, TensorMut, ops::Op};

/// Copies a tensor into memory that can be written, for calls that work in place.
pub fn memory<R: Runtime>(x: &Tensor<R>) -> Result<TensorMut<R>> {
    let mut copy = TensorMut::alloc(x.runtime(), *x.shape(), x.dtype())?;
    copy.accumulate(&Op::identity(), &[x])?;
    Ok(copy)
}
