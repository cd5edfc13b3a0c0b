//! Sums over gradients that do not depend on where the gradients lie.

use std::sync::LazyLock;

use numcore::{
    DType, Result, Runtime, Shape, Tensor,
    ops::{Apply, PointwiseOps, Reduce, ReduceOps, ScalarList, ViewOps, cat},
    pointwise::Program,
};

use super::reduced_gradients::wide;

/// `Σ x²` of one parameter's gradient, or of a piece of it: one element, in `f32` for halves, which are widened as they are read.
pub(crate) fn squares<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    static OWN: LazyLock<Program> = LazyLock::new(|| Program::new("squares", |[x], []| [x * x]));
    static WIDENED: LazyLock<Program> =
        LazyLock::new(|| Program::new("squares", |[x], []| [x.cast(DType::F32) * x.cast(DType::F32)]));
    sum(x, if x.dtype().is_half() { &WIDENED } else { &OWN })
}

/// 0 if all elements are finite, NaN otherwise: one element.
pub(crate) fn zero_if_finite<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    static OWN: LazyLock<Program> = LazyLock::new(|| Program::new("zero_if_finite", |[x], []| [x * 0.0]));
    static WIDENED: LazyLock<Program> =
        LazyLock::new(|| Program::new("zero_if_finite", |[x], []| [x.cast(DType::F32) * 0.0]));
    sum(x, if x.dtype().is_half() { &WIDENED } else { &OWN })
}

fn sum<R: Runtime>(x: &Tensor<R>, program: &LazyLock<Program>) -> Result<Tensor<R>> {
    let to = Shape::new(&vec![1; x.shape().rank()])?;
    let sum = Tensor::apply1(Reduce::sum_of(LazyLock::force(program).clone(), ScalarList::new(), to), &[x])?;
    sum.reshape([1])
}

/// The sum of these numbers, a scalar of the widest type of the runtime: the order of additions depends on how many they are alone.
pub(crate) fn total<R: Runtime>(rt: &R, numbers: &[Tensor<R>]) -> Result<Tensor<R>> {
    let wide = wide(rt);
    match numbers {
        [] => Tensor::zeros(rt, [], wide),
        [first, rest @ ..] if rest.iter().all(|x| x.dtype() == first.dtype()) => {
            cat(&numbers.iter().collect::<Vec<_>>(), 0)?.to_dtype(wide)?.sum(&[], false)
        }
        _ => {
            let numbers = numbers.iter().map(|x| x.to_dtype(wide)).collect::<Result<Vec<_>>>()?;
            cat(&numbers.iter().collect::<Vec<_>>(), 0)?.sum(&[], false)
        }
    }
}
