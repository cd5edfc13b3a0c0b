//! Sums over gradients that do not depend on where the gradients lie.

use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{PointwiseOps, ReduceOps, ViewOps, cat},
};
use optim::norms;

/// The dtype of totals: f64 where the runtime computes it, else f32.
pub(crate) fn wide<R: Runtime>(rt: &R) -> DType {
    if rt.capabilities().compute.contains(&DType::F64) { DType::F64 } else { DType::F32 }
}

/// `Σ x²` of one parameter's gradient, or of a piece of it: one element.
pub(crate) fn squares<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    norms::sum_of_squares(x)?.reshape([1])
}

/// 0 if all elements are finite, NaN otherwise: one element.
pub(crate) fn zero_if_finite<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    norms::zero_if_finite(x)?.reshape([1])
}

/// The sum of `numbers`, a scalar of the widest floating type of the runtime. The order of additions depends on their
/// count alone.
pub(crate) fn total<R: Runtime>(rt: &R, numbers: &[Tensor<R>]) -> Result<Tensor<R>> {
    let wide = wide(rt);
    match numbers {
        [] => Tensor::zeros(rt, [], wide),
        [first, rest @ ..] if rest.iter().all(|x| x.dtype() == first.dtype()) => {
            cat(&numbers.iter().collect::<Vec<_>>(), 0)?.to_dtype(wide)?.sum_all()
        }
        _ => {
            let numbers = numbers.iter().map(|x| x.to_dtype(wide)).collect::<Result<Vec<_>>>()?;
            cat(&numbers.iter().collect::<Vec<_>>(), 0)?.sum_all()
        }
    }
}

#[cfg(test)]
mod tests {
    use runtime_cpu::Cpu;

    use super::*;

    #[test]
    fn totals_have_the_widest_dtype_from_the_first_addition_on() {
        let rt = Cpu::with_threads(1);
        let numbers = [1e8, 1.0, 1.0, 1.0].map(|x: f32| Tensor::from_slice(&rt, [1], &[x]).unwrap());
        assert_eq!(total(&rt, &numbers).unwrap().item().unwrap(), 1e8 + 3.0);
    }
}
