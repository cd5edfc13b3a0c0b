//! Reference models and their values.

use std::path::{Path, PathBuf};

use autograd::Var;
use models_import::OnnxModel;
use numcore::{Tensor, safetensors};
use runtime_cpu::Cpu;

pub type V = Var<Cpu>;

pub fn cpu() -> Cpu {
    Cpu::with_threads(1)
}

fn references() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("references")
}

pub fn path(name: &str) -> PathBuf {
    references().join(format!("{name}.onnx"))
}

pub fn model(name: &str) -> OnnxModel<Cpu> {
    OnnxModel::load(path(name), &cpu()).unwrap()
}

/// The values of a reference.
pub struct Values(Vec<(String, Tensor<Cpu>)>);

impl Values {
    pub fn of(name: &str) -> Self {
        Values(safetensors::load(references().join(format!("{name}.safetensors")), &cpu()).unwrap())
    }

    pub fn get(&self, name: &str) -> &Tensor<Cpu> {
        self.under(name).find(|(rest, _)| rest.is_empty()).unwrap_or_else(|| panic!("no {name}")).1
    }

    /// The values whose names begin so, by the rest of their names.
    pub fn under(&self, prefix: &str) -> impl Iterator<Item = (&str, &Tensor<Cpu>)> {
        self.0.iter().filter_map(move |(name, x)| Some((name.strip_prefix(prefix)?, x)))
    }

    /// The inputs by name; those of floats need gradients.
    pub fn inputs(&self) -> Vec<(&str, V)> {
        let leaf = |(name, x): (_, &Tensor<Cpu>)| {
            let x = if x.dtype().is_float() { Var::leaf(name, x.clone()).unwrap() } else { Var::new(x.clone()) };
            (name, x)
        };
        self.under("in.").map(leaf).collect()
    }
}

/// The first output of inputs by name.
pub fn output(model: &OnnxModel<Cpu>, inputs: &[(&str, V)]) -> V {
    let inputs: Vec<_> = inputs.iter().map(|(name, x)| (*name, x)).collect();
    model.forward_named(&inputs).unwrap().remove(0).1
}

#[track_caller]
pub fn close(what: &str, got: &Tensor<Cpu>, due: &Tensor<Cpu>, tolerance: f64) {
    assert_eq!(got.shape(), due.shape(), "{what}");
    let (got, due) = (got.to_f64s().unwrap(), due.to_f64s().unwrap());
    let worst = got.iter().zip(&due).map(|(g, d)| (g - d).abs() / d.abs().max(1.0)).fold(0.0, f64::max);
    assert!(worst <= tolerance, "{what}: off by {worst:.1e}");
}
