//! Memory to send.

use numcore::{Result, Runtime, Tensor, TensorMut, ops::Op};

/// A copy that can be written.
pub fn memory<R: Runtime>(x: &Tensor<R>) -> Result<TensorMut<R>> {
    let mut copy = TensorMut::alloc(x.runtime(), *x.shape(), x.dtype())?;
    copy.accumulate(&Op::identity(), &[x])?;
    Ok(copy)
}
