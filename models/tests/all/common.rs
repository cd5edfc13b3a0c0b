//! Reference files, scratch folders, and closeness.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use autograd::{Var, backward};
use models::{Decoder, Pretrained};
use nn::{Forward, Init, Initializer, Module, ModuleExt, loss::cross_entropy, parallel::AttentionScores};
use numcore::{
    DType, Result, Tensor,
    fused::AttentionProgram,
    ops::ViewOps,
    safetensors::{self, Reader},
};
use runtime_cpu::Cpu;
use serde_json::Value;

pub type V = Var<Cpu>;

/// The decoders of which there are references.
pub const DECODERS: [&str; 17] = [
    "gpt2",
    "llama",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmo2",
    "phi3",
    "smollm3",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v3_plain",
];

/// The decoders whose layers have options of their own.
pub fn decoders_with_options() -> impl Iterator<Item = &'static str> {
    DECODERS.into_iter().skip_while(|name| *name != "olmo2")
}

/// All decoders of which there are references: a longer text changes the positions of the last (LongRoPE).
pub fn all_decoders() -> impl Iterator<Item = &'static str> {
    DECODERS.into_iter().chain(["phi3_long"])
}

pub fn cpu() -> Cpu {
    Cpu::with_threads(1)
}

pub fn init() -> Init<Cpu> {
    Init::new(&cpu(), 0)
}

/// A folder of `references/`.
pub fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/references").join(name)
}

/// `reference.safetensors` of a folder.
pub struct Reference(Vec<(String, Tensor<Cpu>)>);

impl Reference {
    pub fn read(name: &str) -> Self {
        Reference(safetensors::load(reference(name).join("reference.safetensors"), &cpu()).unwrap())
    }

    pub fn tensor(&self, name: &str) -> Tensor<Cpu> {
        self.0.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}")).1.clone()
    }

    pub fn var(&self, name: &str) -> V {
        Var::new(self.tensor(name))
    }

    pub fn grads(&self) -> impl Iterator<Item = (&str, &Tensor<Cpu>)> {
        self.0.iter().filter_map(|(name, t)| Some((name.strip_prefix("grad/")?, t)))
    }
}

/// `reference.json` of a folder.
pub fn facts(name: &str) -> Value {
    serde_json::from_slice(&fs::read(reference(name).join("reference.json")).unwrap()).unwrap()
}

pub fn decoder(name: &str) -> Decoder<Cpu> {
    Decoder::from_pretrained(reference(name), &init()).unwrap()
}

#[track_caller]
/// Scores with learned slopes of each head, values of positions and heads, and a learned soft cap of all heads. Every
/// third key is hidden from other tokens.
pub fn learned_scores(init: &Init<Cpu>, heads: usize) -> Result<Option<AttentionScores<Cpu>>> {
    let program = AttentionProgram::over(2)
        .score(|score, at, args| {
            let distance = (at.key - at.query).cast_like(score);
            let score = score + args[0].cast_like(score) * distance + (at.key % 7 + at.head).cast_like(score) * 0.1;
            (score / args[1].cast_like(score)).tanh() * args[1].cast_like(score)
        })
        .mask(|at, _| (at.key % 3).ne(1) | at.key.eq(at.query));
    let slopes = init.param([heads, 1, 1], Initializer::Uniform { low: 0.01, high: 0.1 })?;
    let cap = init.param([1], Initializer::Constant(4.0))?;
    Ok(Some(AttentionScores::by(program).learned("slopes", slopes).learned("cap", cap)))
}

pub fn close(what: &str, got: &Tensor<Cpu>, due: &Tensor<Cpu>, tolerance: f64) {
    assert_eq!(got.shape(), due.shape(), "{what}");
    let (got, due) = (got.to_f64s().unwrap(), due.to_f64s().unwrap());
    let worst = got.iter().zip(&due).map(|(g, d)| (g - d).abs() / d.abs().max(1.0)).fold(0.0, f64::max);
    assert!(worst <= tolerance, "{what}: off by {worst:.1e}");
}

/// The mean cross-entropy of each next token.
pub fn next_token_loss(model: &impl Forward<Cpu>, ids: &V) -> V {
    let t = ids.dims()[1];
    let logits = model.forward(ids).unwrap().narrow(1, 0, t - 1).unwrap();
    cross_entropy(&logits, &ids.narrow(1, 1, t - 1).unwrap()).unwrap()
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() { copy_folder(&path, &to) } else { fs::copy(&path, &to).map(drop).unwrap() }
    }
}

/// Compares the gradients of trained parameters with a reference's, whose names `ours` converts; a transposed weight's is transposed.
pub fn check_grads(model: &impl Module<Cpu>, loss: &V, due: &Reference, ours: impl Fn(&str) -> (String, bool)) {
    let grads = backward(loss).unwrap();
    let named = model.named_parameters();
    let mut count = 0;
    for (theirs, due) in due.grads() {
        let (name, transposed) = ours(theirs);
        let parameter = &named.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("{theirs}: no {name}")).1;
        let grad = grads.get(&parameter.leaf()).unwrap_or_else(|| panic!("no gradient of {name}"));
        let grad = if transposed { grad.t().unwrap() } else { grad.clone() };
        close(&name, &grad, due, 1e-4);
        count += 1;
    }
    assert_eq!(count, named.iter().filter(|(_, p)| p.requires_grad()).count());
}

/// Asserts that two sets of safetensors files hold the same tensors, bit by bit.
pub fn same_tensors(a: &[PathBuf], b: &[PathBuf]) {
    let all = |paths: &[PathBuf]| {
        let mut all: Vec<(String, DType, Vec<usize>, Vec<u8>)> = Vec::new();
        for path in paths {
            let reader = Reader::open(path).unwrap();
            let names: Vec<String> = reader.names().map(String::from).collect();
            for name in names {
                let (dtype, shape) = reader.tensor(&name).unwrap();
                let (dtype, dims) = (dtype, shape.dims().to_vec());
                all.push((name.clone(), dtype, dims, reader.bytes(&name).unwrap()));
            }
        }
        all.sort();
        all
    };
    let (a, b) = (all(a), all(b));
    assert!(a.iter().map(|t| &t.0).eq(b.iter().map(|t| &t.0)), "names differ");
    assert!(a == b, "values differ");
}

/// The safetensors files of weights in a folder.
pub fn weight_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let named = |p: &PathBuf, start: &str| p.file_name().unwrap().to_str().unwrap().starts_with(start);
    let is = |p: &PathBuf| p.extension().is_some_and(|e| e == "safetensors") && !named(p, "reference");
    let mut files: Vec<PathBuf> = entries.filter(is).collect();
    files.sort();
    files
}

/// A fresh folder, removed on drop.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("weftgrad-models-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    /// A copy of a folder of `references/`.
    pub fn copy_of(name: &str) -> Scratch {
        let scratch = Scratch::new();
        copy_folder(&reference(name), &scratch.0);
        scratch
    }

    /// A copy of some files of a folder of `references/`.
    pub fn copy_of_file(name: &str, files: &[&str]) -> Scratch {
        let scratch = Scratch::new();
        for file in files {
            fs::copy(reference(name).join(file), scratch.0.join(file)).unwrap();
        }
        scratch
    }

    /// Changes the fields of `config.json`.
    pub fn with_config(self, change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Scratch {
        let path = self.0.join("config.json");
        let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(value.as_object_mut().unwrap());
        fs::write(&path, value.to_string()).unwrap();
        self
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
