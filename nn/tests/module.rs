//! Names, state and modes of a model, and what the derive macro makes of a struct.

mod common;

use common::{T, cpu};
use nn::*;
use numcore::{DType, Tensor};
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
struct Model<R>
where
    R: Runtime,
{
    embed: Embedding<R>,
    blocks: Vec<Layer<R>>,
    head: Box<dyn Forward<R>>,
    #[module(flatten)]
    tail: Sequential<R>,
    tied: Param<R>,
    #[allow(dead_code, reason = "plain fields are left out")]
    plain: (Vec<Option<f64>>, [u64; 2], String),
    #[module(skip)]
    _skipped: std::cell::OnceCell<()>,
}

// SAFETY is not needed: `OnceCell<()>` is `Send` alone, so the skipped field is held in a way that is also `Sync`.
