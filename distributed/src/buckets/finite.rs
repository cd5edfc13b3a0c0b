//! Whether a gradient that may be written still is finite.

use std::sync::LazyLock;

use numcore::{
    DType, Result, Runtime, TensorMut,
    ops::{Input, ReduceOps, compute},
    pointwise::Program,
};

/// Whether every element is; waits for the device. Halves are widened, all others are looked at as they are.
pub(super) fn is_finite<R: Runtime>(x: &TensorMut<R>) -> Result<bool> {
    static OWN: LazyLock<Program> = LazyLock::new(|| Program::new("zero_if_finite", |[x], []| [x * 0.0]));
    static WIDENED: LazyLock<Program> =
        LazyLock::new(|| Program::new("zero_if_finite", |[x], []| [x.cast(DType::F32) * 0.0]));
    let (program, dtype) = if x.dtype().is_half() { (&WIDENED, DType::F32) } else { (&OWN, x.dtype()) };
    let mut zeros = TensorMut::alloc(x.runtime(), *x.shape(), dtype)?;
    compute(x.runtime(), program, &[Input::Memory(x)], &[], &mut [&mut zeros])?;
    Ok(zeros.freeze()?.sum(&[], false)?.item()?.is_finite())
}
