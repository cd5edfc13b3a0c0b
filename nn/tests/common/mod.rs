//! Reference values from PyTorch, and closeness.
#![allow(dead_code, missing_docs, reason = "each test binary uses a part of it")]

use std::collections::BTreeMap;

use autograd::{Backward, Gradients, Var};
use numcore::{DType, Tensor, safetensors};
use runtime_cpu::Cpu;
use serde_json::Value;

pub type V = Var<Cpu>;
pub type T = Tensor<Cpu>;

pub fn cpu() -> Cpu {
    Cpu::with_threads(2)
}

/// Input `k`, whose element `i` is `sin(1.3 i + 0.7 k + 0.5)`.
pub fn made(k: usize, shape: &[usize]) -> V {
    let mut i = 0.0;
    let next = || {
        i += 1.0;
        f64::sin(1.3 * (i - 1.0) + 0.7 * k as f64 + 0.5)
    };
    Var::leaf(&format!("in{k}"), Tensor::from_f64_fn(&cpu(), shape, DType::F64, next).unwrap()).unwrap()
}

fn folder() -> String {
    format!("{}/../conformance/goldens", env!("CARGO_MANIFEST_DIR"))
}

/// The tensors of a group of reference values.
pub struct Goldens {
    pub tensors: BTreeMap<String, T>,
    pub cases: Vec<Value>,
}

impl Goldens {
    pub fn read(rt: &Cpu, group: &str) -> Self {
        let tensors = safetensors::load(format!("{}/{group}.safetensors", folder()), rt).unwrap();
        let json = std::fs::read_to_string(format!("{}/{group}.json", folder())).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let cases = json["cases"].as_array().unwrap().clone();
        Goldens { tensors: tensors.into_iter().collect(), cases }
    }

    /// The cases of an op.
    pub fn of(&self, op: &str) -> Vec<Case<'_>> {
        let of_op = self.cases.iter().filter(|c| c["op"] == op);
        let cases: Vec<Case> =
            of_op.map(|case| Case { goldens: self, id: case["id"].as_str().unwrap(), case }).collect();
        assert!(!cases.is_empty(), "no reference values for {op}");
        cases
    }
}

pub struct Case<'a> {
    goldens: &'a Goldens,
    pub id: &'a str,
    pub case: &'a Value,
}

impl Case<'_> {
    pub fn attr(&self, name: &str) -> &Value {
        &self.case["attrs"][name]
    }

    pub fn number(&self, name: &str) -> f64 {
        self.attr(name).as_f64().unwrap_or_else(|| panic!("{} has no {name}", self.id))
    }

    pub fn count(&self, name: &str) -> usize {
        self.number(name) as usize
    }

    pub fn get(&self, name: &str) -> T {
        let full = format!("{}/{name}", self.id);
        self.goldens.tensors.get(&full).unwrap_or_else(|| panic!("{full} is missing")).clone()
    }

    /// Input `i` as a leaf, or as a constant where it has no gradient.
    pub fn input(&self, i: usize) -> V {
        let value = self.get(&format!("in{i}"));
        if value.dtype().is_float() { Var::leaf(&format!("in{i}"), value).unwrap() } else { Var::new(value) }
    }

    /// Checks output 0, and the gradients of `leaves`, each by its input's index.
    pub fn check(&self, out: &V, leaves: &[(usize, &V)]) {
        let tol = self.case["tol"].as_f64().unwrap();
        close(&format!("{} out", self.id), &out.value().unwrap(), &self.get("out0"), tol);
        let seed = Var::new(self.get("gout0"));
        let mut gradients = Gradients::new();
        Backward::from(out, &seed).unwrap().run(&mut gradients).unwrap();
        for (i, leaf) in leaves {
            let grad = gradients.of(leaf).unwrap_or_else(|| panic!("{}: no gradient of input {i}", self.id));
            close(&format!("{} gin{i}", self.id), grad, &self.get(&format!("gin{i}")), tol);
        }
    }
}

/// Equal within `tol` of the largest magnitude expected.
pub fn close(what: &str, got: &T, want: &T, tol: f64) {
    assert_eq!(got.dims(), want.dims(), "{what}: shapes");
    let (got, want) = (got.to_f64s().unwrap(), want.to_f64s().unwrap());
    let scale = want.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!((g - w).abs() <= tol * scale, "{what}[{i}]: {g}, expected {w} (scale {scale}, tolerance {tol})");
    }
}

pub fn f64s(x: &V) -> Vec<f64> {
    x.value().unwrap().to_f64s().unwrap()
}

/// An empty folder of this test's own, removed when it ends.
pub fn scratch(name: &str) -> Scratch {
    let folder = std::env::temp_dir().join(format!("weftgrad-nn-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    Scratch(folder)
}

pub struct Scratch(std::path::PathBuf);

impl std::ops::Deref for Scratch {
    type Target = std::path::Path;
    fn deref(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
