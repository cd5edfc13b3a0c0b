//! Sums of squares and norms, on the device.

use std::sync::LazyLock;

use numcore::{
    DType, Result, Runtime, Shape, Tensor,
    ops::{Apply, Reduce, ScalarList},
    pointwise::Program,
};

static SQUARES: LazyLock<Program> = LazyLock::new(|| Program::new("squares", |[x], []| [x * x]));
static WIDE_SQUARES: LazyLock<Program> = LazyLock::new(|| {
    Program::new("squares", |[x], []| {
        let x = x.cast(DType::F32);
        [x * x]
    })
});
static ZEROS: LazyLock<Program> = LazyLock::new(|| Program::new("zero_if_finite", |[x], []| [x * 0.0]));
static WIDE_ZEROS: LazyLock<Program> =
    LazyLock::new(|| Program::new("zero_if_finite", |[x], []| [x.cast(DType::F32) * 0.0]));

/// The dtype in which norms of a dtype are computed: `f64` for itself, `f32` for all others.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { dtype } else { DType::F32 }
}

fn sum<R: Runtime>(x: &Tensor<R>, [own, widened]: [&Program; 2]) -> Result<Tensor<R>> {
    let program = if wide(x.dtype()) == x.dtype() { own } else { widened };
    let to = Shape::new(&vec![1; x.shape().rank()])?;
    Tensor::apply1(Reduce::sum_of(program.clone(), ScalarList::new(), to), &[x])
}

/// `Σx²` as one element with `x`'s rank, in `f32` for half-precision inputs.
pub(crate) fn sum_of_squares<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    sum(x, [&SQUARES, &WIDE_SQUARES])
}

/// 0 if all are finite, NaN otherwise.
pub(crate) fn zero_if_finite<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    sum(x, [&ZEROS, &WIDE_ZEROS])
}
