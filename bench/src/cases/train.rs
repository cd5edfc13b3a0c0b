//! Training steps: clear the gradients, forward, backward, AdamW, read the loss.

use std::rc::Rc;

use weftgrad::{
    DType, Leaf, NnOps, Result, Runtime, Tensor, Var,
    nn::{Conv2d, Forward, Gpt, GptConfig, Init, Linear, ModuleExt, Relu, Sequential, parallel::VocabularyLoss},
    ops::{PointwiseOps, ViewOps},
    optim::{AdamW, AdamWConfig, Optimizer},
    prelude::Module,
};

use super::{Case, data};

const LR: f64 = 3e-4;

fn config(lr: f64) -> AdamWConfig {
    AdamWConfig { lr, weight_decay: 1e-2, ..Default::default() }
}

/// A case of whole training steps, warmed up by three of them.
fn steps<R: Runtime, M: Module<R> + 'static>(
    model: M,
    long: bool,
    loss: impl Fn(&M) -> Result<Var<R>> + 'static,
) -> Result<Case> {
    let mut optimizer = AdamW::new(&model, config(LR))?;
    let last = Rc::new(std::cell::Cell::new(None));
    let seen = last.clone();
    let mut run = move || {
        let loss = loss(&model)?;
        optimizer.backward(&loss)?;
        optimizer.step()?;
        seen.set(Some(loss.item()?));
        Ok(())
    };
    (0..3).try_for_each(|_| run())?;
    Ok(Case { long, loss: last, ..Case::new(run) })
}

pub fn adamw<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let each = n[0] / 16;
    let dtype = data::dtype_of(name);
    let leaf = |i: u64| Leaf::new(&format!("p{i}"), data::normal(rt, &[each], dtype, i)?);
    let leaves = (0..16).map(leaf).collect::<Result<Vec<_>>>()?;
    let mut optimizer = AdamW::over(config(1e-3), leaves.clone())?;
    let mut gradients = optimizer.alloc_gradients()?;
    let mut given = weftgrad::Gradients::new();
    for leaf in &leaves {
        given.set(leaf, data::normal(rt, &[each], dtype, 99)?.mul(1e-3)?)?;
    }
    gradients.copy_from(&given)?;
    drop((given, leaves));
    Ok(Case::new(move || optimizer.step_from(&gradients)))
}

pub fn mlp<R: Runtime>(rt: &R, _: &str, _: &[usize]) -> Result<Case> {
    let init = Init::new(rt, 0);
    let model = Sequential::new()
        .push(Linear::new(&init, 784, 512)?)
        .push(Relu)
        .push(Linear::new(&init, 512, 512)?)
        .push(Relu)
        .push(Linear::new(&init, 512, 10)?);
    let x = Var::new(data::normal(rt, &[128, 784], DType::F32, 1)?);
    let y = Var::new(data::classes(rt, &[128], 10, 2)?);
    steps(model, false, move |m| m.forward(&x)?.cross_entropy(&y))
}

/// conv 3×3 (32) – conv 3×3 (64) – max-pool 2 – 128 – 10.
#[derive(Module)]
struct Cnn<R: Runtime> {
    c1: Conv2d<R>,
    c2: Conv2d<R>,
    f1: Linear<R>,
    f2: Linear<R>,
}

pub fn cnn<R: Runtime>(rt: &R, _: &str, _: &[usize]) -> Result<Case> {
    let init = Init::new(rt, 0);
    let model = Cnn {
        c1: Conv2d::new(&init, 1, 32, [3, 3], Default::default())?,
        c2: Conv2d::new(&init, 32, 64, [3, 3], Default::default())?,
        f1: Linear::new(&init, 64 * 12 * 12, 128)?,
        f2: Linear::new(&init, 128, 10)?,
    };
    let x = Var::new(data::normal(rt, &[64, 1, 28, 28], DType::F32, 1)?);
    let y = Var::new(data::classes(rt, &[64], 10, 2)?);
    steps(model, false, move |m| {
        let h = m.c2.forward(&m.c1.forward(&x)?.relu()?)?.relu()?.max_pool2d([2, 2], [2, 2], [0, 0])?;
        let logits = m.f2.forward(&m.f1.forward(&h.flatten(1, -1)?)?.relu()?)?;
        logits.cross_entropy(&y)
    })
}

/// Random tokens, and each one's successor.
fn tokens<R: Runtime>(rt: &R, batch: usize, config: &GptConfig) -> Result<(Var<R>, Var<R>)> {
    let length = config.context;
    let tokens = data::classes(rt, &[batch, length + 1], config.vocab, 1)?;
    let x = Var::new(tokens.narrow(1, 0, length)?.contiguous()?);
    let y: Tensor<R> = tokens.narrow(1, 1, length)?.contiguous()?;
    Ok((x, Var::new(y)))
}

fn language_model<R: Runtime>(rt: &R, config: GptConfig, batch: usize, dtype: DType) -> Result<Case> {
    let (x, y) = tokens(rt, batch, &config)?;
    let model = Gpt::new(&Init::new(rt, 0), config)?;
    if dtype != DType::F32 {
        model.to_dtype(dtype)?;
    }
    steps(model, true, move |m| m.next_token_loss(&x, &y, &VocabularyLoss::default()))
}

pub fn gpt<R: Runtime>(rt: &R, name: &str, _: &[usize]) -> Result<Case> {
    let dtype = if name == "gptbf16" { DType::BF16 } else { DType::F32 };
    language_model(rt, GptConfig::default(), 8, dtype)
}

/// GPT-2 with 124 million parameters (Radford et al. 2019) in bf16: batch and context as given.
pub fn gpt2<R: Runtime>(rt: &R, _: &str, n: &[usize]) -> Result<Case> {
    let size = GptConfig {
        vocab: 50257,
        context: n[1],
        layers: 12,
        heads: 12,
        width: 768,
        tied_head: true,
        ..Default::default()
    };
    language_model(rt, size, n[0], DType::BF16)
}
