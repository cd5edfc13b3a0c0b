//! Names, state and modes of a model, and what the derive macro generates for a struct.

use std::{sync::Arc, time::Duration};

use crate::common::{self, T, cpu};
use autograd::Var;
use nn::*;
use numcore::{DType, ErrorKind, NullRuntime, Result, Tensor, ops::PointwiseOps};
use runtime_cpu::Cpu;

#[derive(Module)]
struct Attention<R: Runtime> {
    qkv: Linear<R>,
    proj: Linear<R>,
    #[allow(dead_code, reason = "plain fields are left out")]
    heads: usize,
}

#[derive(Module)]
struct Layer<R: Runtime> {
    #[module(rename = "attn")]
    attention: Attention<R>,
    norm: Option<BatchNorm1d<R>>,
    dropout: Dropout,
}

/// Everything a field can be.
#[derive(Module)]
#[module(crate = "::nn")]
struct Model<R, M>
where
    R: Runtime,
    M: Module<R>,
{
    embed: Embedding<R>,
    blocks: Vec<Layer<R>>,
    head: Box<dyn Forward<R>>,
    #[module(flatten)]
    tail: M,
    tied: Param<R>,
    #[allow(dead_code, reason = "plain fields are left out")]
    plain: (Vec<Option<f64>>, [u64; 2], String),
    #[module(skip)]
    #[allow(dead_code, reason = "left out by its attribute")]
    skipped: Duration,
}

#[derive(Module)]
struct Pair<R: Runtime>(Linear<R>, Arc<Buffer<R>>);

fn layer(init: &Init<Cpu>, norm: bool) -> Layer<Cpu> {
    let linear = |i, o| Linear::new(init, i, o).unwrap();
    Layer {
        attention: Attention { qkv: linear(4, 12), proj: linear(4, 4).without_bias(), heads: 2 },
        norm: norm.then(|| BatchNorm1d::new(init, 4).unwrap()),
        dropout: Dropout::new(0.5).unwrap(),
    }
}

fn model(seed: u64) -> Model<Cpu, Sequential<Cpu>> {
    let init = &Init::new(&cpu(), seed);
    let embed = Embedding::new(init, 10, 4).unwrap();
    Model {
        tied: embed.weight.clone(),
        embed,
        blocks: vec![layer(init, true), layer(init, false)],
        head: Box::new(Linear::new(init, 4, 3).unwrap()),
        tail: Sequential::new().push(Relu).push(Linear::new(init, 3, 3).unwrap()),
        plain: (vec![None], [1, 2], String::new()),
        skipped: Duration::ZERO,
    }
}

const NAMES: [&str; 13] = [
    "embed.weight",
    "blocks.0.attn.qkv.weight",
    "blocks.0.attn.qkv.bias",
    "blocks.0.attn.proj.weight",
    "blocks.0.norm.weight",
    "blocks.0.norm.bias",
    "blocks.1.attn.qkv.weight",
    "blocks.1.attn.qkv.bias",
    "blocks.1.attn.proj.weight",
    "head.weight",
    "head.bias",
    "1.weight",
    "1.bias",
];

fn names<X>(named: &[(String, X)]) -> Vec<&str> {
    named.iter().map(|(n, _)| n.as_str()).collect()
}

#[test]
fn parameters_are_named_by_fields_in_their_order() {
    let model = model(0);
    let named = model.named_parameters();
    assert_eq!(names(&named), NAMES, "the tied parameter comes once, under its first name");
    assert!(named.iter().all(|(n, p)| *p.leaf().name() == **n), "leaves have their full names");
    let buffers = ["running_mean", "running_var", "num_batches_tracked"].map(|b| format!("blocks.0.norm.{b}"));
    assert_eq!(names(&model.named_buffers()), buffers);
    let pair = Pair(
        Linear::new(&Init::new(&cpu(), 0), 2, 2).unwrap(),
        Arc::new(Buffer::new(Tensor::zeros(&cpu(), [1], DType::F32).unwrap())),
    );
    assert_eq!(names(&pair.state_dict().unwrap()), ["0.weight", "0.bias", "1"]);
}

#[test]
fn every_part_is_shown_where_it_occurs() {
    let mut seen = Vec::new();
    walk(&model(0), |name, entry| {
        seen.push(match entry {
            ModuleEntry::Parameter(_) => name.to_string(),
            ModuleEntry::Buffer(_) => format!("buffer {name}"),
            ModuleEntry::Mode(_) => format!("mode {name}"),
            ModuleEntry::Adapter(_) => format!("adapter {name}"),
            ModuleEntry::Context(_) => format!("context {name}"),
        });
    });
    assert!(seen.iter().any(|s| s == "mode blocks.1.dropout") && seen.iter().any(|s| s == "mode blocks.0.norm"));
    assert_eq!(seen.last().unwrap(), "tied");
}

#[test]
fn modes_reach_every_part() {
    let model = model(0);
    let dropout = &model.blocks[1].dropout.mode;
    let norm = &model.blocks[0].norm.as_ref().unwrap().mode;
    assert!(dropout.is_training() && norm.is_training());
    model.eval();
    assert!(!dropout.is_training() && !norm.is_training());
    model.train();
    assert!(dropout.is_training() && norm.is_training());
}

#[test]
fn freezing_counts_and_stops_gradients() {
    let model = model(0);
    let all = model.num_parameters();
    assert_eq!((all.trainable, all.total), (227, 227));
    model.freeze_where(under("blocks.1"));
    assert_eq!(model.num_parameters(), ParameterCount { trainable: 227 - 76, total: 227 });
    let x = Var::new(Tensor::ones(&cpu(), [2, 4], DType::F32).unwrap());
    let y = model.blocks[1].attention.qkv.forward(&x).unwrap();
    assert!(!y.requires_grad(), "nothing it depends on is trained");
    model.unfreeze();
    assert_eq!(model.num_parameters(), all);
    model.freeze();
    assert_eq!(model.num_parameters().trainable, 0);
}

#[test]
fn a_prefix_ends_at_a_dot() {
    let encoder = under("encoder");
    assert!(encoder("encoder") && encoder("encoder.0.weight"));
    assert!(!encoder("encoder2.weight") && !encoder("my.encoder"));
    assert!(under("")("anything"));
}

#[test]
fn the_summary_lists_and_sums() {
    let model = model(0);
    model.freeze_where(under("head"));
    let table = model.summary();
    let line = |name: &str| table.lines().find(|l| l.starts_with(name)).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(line("blocks.0.attn.qkv.weight"), ["blocks.0.attn.qkv.weight", "[12,", "4]", "f32", "yes", "48"]);
    assert_eq!(line("head.bias")[3], "no");
    assert_eq!(table.lines().last().unwrap(), "227 numbers, 212 trained, 908 bytes");
    let width = table.lines().next().unwrap().chars().count();
    assert!(table.lines().take(14).all(|l| l.chars().count() == width), "columns are aligned:\n{table}");
}

#[test]
fn the_dtype_changes_in_place() {
    let model = model(0);
    model.freeze_where(under("head"));
    let before = model.embed.weight.value().unwrap();
    model.to_dtype(DType::BF16).unwrap();
    assert!(model.parameters().iter().all(|p| p.dtype() == DType::BF16));
    assert_eq!(model.tied.leaf().id(), model.embed.weight.leaf().id(), "what is shared stays shared");
    let rounded = before.to_dtype(DType::BF16).unwrap().to_f64s().unwrap();
    assert_eq!(model.embed.weight.value().unwrap().to_f64s().unwrap(), rounded);
    let dtypes: Vec<DType> = model.named_buffers().iter().map(|(_, b)| b.spec().dtype).collect();
    assert_eq!(dtypes, [DType::BF16, DType::BF16, DType::I64], "counts stay whole numbers");
    let frozen = model.named_parameters().into_iter().find(|(n, _)| n == "head.weight").unwrap().1;
    assert!(!frozen.requires_grad() && *frozen.leaf().name() == *"head.weight");
}

fn values(model: &impl Module<Cpu>) -> Vec<Vec<f64>> {
    model.state_dict().unwrap().iter().map(|(_, t)| t.to_f64s().unwrap()).collect()
}

#[test]
fn state_goes_from_model_to_model() {
    let (a, b) = (model(1), model(2));
    assert_ne!(values(&a), values(&b));
    let state = a.state_dict().unwrap();
    assert_eq!(state.len(), NAMES.len() + 3);
    b.load_state_dict(state).unwrap();
    assert_eq!(values(&a), values(&b));
    let (x, y) = (a.embed.weight.value().unwrap(), b.embed.weight.value().unwrap());
    assert!(!x.shares_memory_with(&y), "both models own their values, and can update them in place");
}

/// PyTorch writes a shared parameter under each of its names.
#[test]
fn a_shared_parameter_is_found_under_any_name() {
    let (a, b) = (model(1), model(2));
    let mut state = a.state_dict().unwrap();
    state.push(("tied".into(), a.tied.value().unwrap()));
    b.load_state_dict(state.clone()).unwrap();
    state.retain(|(n, _)| n != "embed.weight");
    b.load_state_dict(state).unwrap();
    assert_eq!(values(&a), values(&b));
}

fn wrong_state() -> Vec<(String, T)> {
    let mut state = model(1).state_dict().unwrap();
    state.retain(|(n, _)| n != "embed.weight" && n != "head.bias");
    let by_name = |n: &str| state.iter().position(|(m, _)| m == n).unwrap();
    let (shape, dtype) = (by_name("head.weight"), by_name("1.bias"));
    state[shape].1 = Tensor::zeros(&cpu(), [3, 5], DType::F32).unwrap();
    state[dtype].1 = Tensor::zeros(&cpu(), [3], DType::F64).unwrap();
    state.push(("lm.weight".into(), Tensor::zeros(&cpu(), [1], DType::F32).unwrap()));
    state.push(("extra".into(), Tensor::zeros(&cpu(), [1], DType::F32).unwrap()));
    state
}

#[test]
fn one_error_lists_everything_and_nothing_changes() {
    let model = model(2);
    let before = values(&model);
    let error = model.load_state_dict(wrong_state()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::State { .. }));
    assert_eq!(
        error.kind().to_string(),
        "`state dict`: 2 missing: embed.weight, head.bias; 2 unexpected: extra, lm.weight; \
         2 mismatching: head.weight is f32 [3, 4], given f32 [3, 5], 1.bias is f32 [3], given f64 [3]"
    );
    assert_eq!(values(&model), before);
    let error = model.load_partial_state_dict(wrong_state()).unwrap_err().to_string();
    assert!(error.starts_with("`state dict`: 2 mismatching:"), "{error}");
    assert_eq!(values(&model), before);
}

#[test]
fn a_load_that_is_not_strict_reports() {
    let model = model(2);
    let state = wrong_state().into_iter().filter(|(n, _)| n != "head.weight" && n != "1.bias").collect();
    let report = model.load_partial_state_dict(state).unwrap();
    assert_eq!(report.missing, ["embed.weight", "head.weight", "head.bias", "1.bias"]);
    assert_eq!(report.unexpected, ["extra", "lm.weight"]);
    let twice = vec![("embed.weight".to_string(), model.tied.value().unwrap()); 2];
    assert!(model.load_partial_state_dict(twice).unwrap_err().to_string().contains("embed.weight is given twice"));
}

#[test]
fn a_file_brings_the_state_back() {
    let (a, b) = (model(1), model(2));
    let folder = common::scratch("state");
    let path = folder.join("model.safetensors");
    a.save_safetensors(&path).unwrap();
    b.load_safetensors(&path).unwrap();
    assert_eq!(values(&a), values(&b));
    let error = b.load_safetensors(path.with_file_name("absent")).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Io { .. }));
}

#[test]
fn a_buffer_keeps_its_shape_and_dtype() {
    let buffer = Buffer::new(Tensor::zeros(&cpu(), [2], DType::F32).unwrap());
    let error = buffer.set(Tensor::zeros(&cpu(), [3], DType::F32).unwrap()).unwrap_err();
    assert_eq!(error.kind().to_string(), "`buffer`: is f32 [2], the new value is f32 [3]");
}

/// What a part of a model is asked does not rename what the whole has named: checkpoints and gradient buckets go by these names.
#[test]
fn a_part_leaves_the_names_of_the_whole() -> Result<()> {
    let init = Init::new(&NullRuntime::new(), 0);
    let model = Sequential::new().push(Linear::new(&init, 2, 2)?).push(Linear::new(&init, 2, 2)?);
    let names = || model.named_parameters().iter().map(|(_, p)| p.leaf().name().to_string()).collect::<Vec<_>>();
    let leaves: Vec<_> = model.parameters().iter().map(|p| p.leaf()).collect();
    let whole = names();
    assert_eq!(whole, ["0.weight", "0.bias", "1.weight", "1.bias"]);
    for layer in model.into_layers() {
        layer.parameters();
        layer.summary();
    }
    assert_eq!(leaves.iter().map(|leaf| leaf.name().to_string()).collect::<Vec<_>>(), whole);
    Ok(())
}
