//! Sums over gradients that do not depend on where the gradients lie.

use numcore::{Result, Runtime, Tensor, ops::ViewOps};
use optim::norms;
pub(crate) use optim::norms::{total, widest as wide};

/// `Σ x²` of one parameter's gradient, or of a piece of it: one element.
pub(crate) fn squares<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    norms::sum_of_squares(x)?.reshape([1])
}

/// 0 if all elements are finite, NaN otherwise: one element.
pub(crate) fn zero_if_finite<R: Runtime>(x: &Tensor<R>) -> Result<Tensor<R>> {
    norms::zero_if_finite(x)?.reshape([1])
}

#[cfg(test)]
mod tests {
    use runtime_cpu::Cpu;

    use super::*;

    #[test]
    fn totals_have_the_widest_dtype_from_the_first_addition_on() {
        let rt = Cpu::with_threads(1);
        let numbers = [1e8, 1.0, 1.0, 1.0].map(|x: f32| Tensor::from_slice(&rt, [1], &[x]).unwrap());
        assert_eq!(total(&rt, &numbers, 1).unwrap().item().unwrap(), 1e8 + 3.0);
    }
}
