//! Inputs of cases, equal on every run.

use weftgrad::{DType, Result, Runtime, Tensor};

/// The dtype that a case's name contains; `f32` if it contains none.
pub(super) fn dtype_of(name: &str) -> DType {
    match name {
        _ if name.contains("bf16") => DType::BF16,
        _ if name.contains("f16") => DType::F16,
        _ => DType::F32,
    }
}

/// Standard normal values from a random stream. Large tensors repeat a million draws, which times the same and starts
/// sooner.
pub(super) fn normal<R: Runtime>(rt: &R, shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor<R>> {
    let n: usize = shape.iter().product();
    let mut rng = weftgrad::rng::Philox::new(seed, 0);
    let draws: Vec<f64> = (0..n.min(1 << 20)).map(|_| rng.normal()).collect();
    let mut values = draws.iter().cycle();
    Tensor::from_f64_fn(rt, shape, dtype, || values.next().copied().unwrap_or(0.0))
}

/// Integers below `limit`.
pub(super) fn classes<R: Runtime>(rt: &R, shape: &[usize], limit: usize, seed: u64) -> Result<Tensor<R>> {
    let mut rng = weftgrad::rng::Philox::new(seed, 1);
    let values: Vec<i64> = (0..shape.iter().product()).map(|_| rng.below(limit as u64) as i64).collect();
    Tensor::from_slice(rt, shape, &values)
}
