//! What several tests need: PyTorch's reference values, and small models of leaves.
#![allow(dead_code, reason = "each test uses a part")]

use std::{collections::HashMap, path::PathBuf, sync::Arc};

use autograd::Leaf;
use numcore::{DType, Runtime, Tensor, ops::PointwiseOps};
use optim::{FlatGradients, Optimizer};

pub type Params<R> = Vec<Arc<Leaf<R>>>;

pub fn goldens(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../conformance/goldens").join(file)
}

pub fn json(file: &str) -> serde_json::Value {
    let text = std::fs::read_to_string(goldens(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    serde_json::from_str(&text).unwrap()
}

pub fn tensors<R: Runtime>(file: &str, rt: &R) -> HashMap<String, Tensor<R>> {
    numcore::safetensors::load(goldens(file), rt).unwrap().into_iter().collect()
}

/// Deterministic values in [−1, 1), different for each `k`.
pub fn values(n: usize, k: usize) -> Vec<f64> {
    (0..n).map(|i| ((i * 37 + k * 101 + 13) % 257) as f64 / 128.5 - 1.0).collect()
}

pub fn tensor<R: Runtime>(rt: &R, shape: &[usize], dtype: DType, k: usize) -> Tensor<R> {
    let data = values(shape.iter().product(), k);
    Tensor::from_slice(rt, shape, &data).unwrap().to_dtype(dtype).unwrap()
}

/// Leaves `p0`, `p1` … of these shapes.
pub fn leaves<R: Runtime>(rt: &R, shapes: &[&[usize]], dtype: DType) -> Params<R> {
    let leaf = |(i, s): (usize, &&[usize])| Leaf::new(&format!("p{i}"), tensor(rt, s, dtype, i)).unwrap();
    shapes.iter().enumerate().map(leaf).collect()
}

/// Gives every parameter of `with` a gradient that depends on `k` alone.
pub fn fill<R: Runtime>(gradients: &mut FlatGradients<R>, with: &[Arc<Leaf<R>>], k: usize) {
    gradients.zero();
    for (i, leaf) in with.iter().enumerate() {
        let spec = leaf.spec();
        let grad = tensor(leaf.runtime(), &spec.shape, spec.dtype, 1000 * k + i);
        gradients.set(leaf, &grad).unwrap();
    }
}

pub fn numbers<R: Runtime>(params: &[Arc<Leaf<R>>]) -> Vec<Vec<f64>> {
    params.iter().map(|l| l.value().unwrap().to_f64s().unwrap()).collect()
}

/// State as bytes, in its own order.
pub fn bytes<R: Runtime>(state: &[(String, Tensor<R>)]) -> Vec<(String, Vec<u8>)> {
    state.iter().map(|(n, t)| (n.clone(), t.to_bytes().unwrap())).collect()
}

pub fn copies<R: Runtime>(state: Vec<(String, Tensor<R>)>) -> Vec<(String, Tensor<R>)> {
    state.into_iter().map(|(n, t)| (n, t.copy().unwrap())).collect()
}

/// `n` steps with gradients that depend only on the step.
pub fn train<R: Runtime>(optimizer: &mut dyn Optimizer<R>, params: &[Arc<Leaf<R>>], steps: std::ops::Range<usize>) {
    let mut gradients = optimizer.alloc_gradients().unwrap();
    for k in steps {
        fill(&mut gradients, params, k);
        optimizer.step_from(&gradients).unwrap();
    }
}

#[track_caller]
pub fn close(got: &[f64], want: &[f64], tol: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = want.iter().fold(0f64, |m, x| m.max(x.abs())).max(1e-30);
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tol * w.abs().max(size * 1e-2), "{what}[{i}]: {g} instead of {w}");
    }
}
