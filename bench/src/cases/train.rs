//! Training steps: clear the gradients, forward, backward, AdamW, read the loss.

use std::rc::Rc;

use weftgrad::{
    Cpu, DType, Leaf, NnOps, Result, Runtime, Tensor, Var,
    nn::{Conv2d, Forward, Gpt, GptConfig, Init, Linear, ModuleExt, Relu, Sequential},
    ops::{Apply, PointwiseOps, ViewOps},
    optim::{AdamW, AdamWConfig, FlatGradients, Optimizer},
    prelude::Module,
};

use super::{Case, data};

const LR: f64 = 3e-4;

fn optimizer(lr: f64, leaves: Vec<std::sync::Arc<Leaf<Cpu>>>) -> Result<(AdamW<Cpu>, FlatGradients<Cpu>)> {
    let optimizer = AdamW::over(AdamWConfig { lr, weight_decay: 1e-2, ..Default::default() }, leaves)?;
    let gradients = optimizer.gradients()?;
    Ok((optimizer, gradients))
}

/// A case of whole training steps, warmed up by three of them.
fn steps<M: Module<Cpu> + 'static>(
    model: M,
    long: bool,
    loss: impl Fn(&M) -> Result<Var<Cpu>> + 'static,
) -> Result<Case> {
    let (mut optimizer, mut gradients) = optimizer(LR, model.parameters().iter().map(|p| p.leaf()).collect())?;
    let last = Rc::new(std::cell::Cell::new(None));
    let seen = last.clone();
    let mut run = move || {
        let loss = loss(&model)?;
        gradients.zero();
        weftgrad::backward_with_hooks(&loss, &mut gradients)?;
        optimizer.step(&gradients)?;
        seen.set(Some(loss.item()?));
        Ok(())
    };
    (0..3).try_for_each(|_| run())?;
    Ok(Case { run: Box::new(run), long, loss: last })
}

pub fn adamw(cpu: &Cpu, _: &str, n: &[usize]) -> Result<Case> {
    let each = n[0] / 16;
    let leaf = |i: u64| Leaf::new(&format!("p{i}"), data::normal(cpu, &[each], DType::F32, i)?);
    let leaves = (0..16).map(leaf).collect::<Result<Vec<_>>>()?;
    let (mut optimizer, mut gradients) = optimizer(1e-3, leaves.clone())?;
    let mut given = weftgrad::Gradients::new();
    for leaf in &leaves {
        given.set(leaf, data::normal(cpu, &[each], DType::F32, 99)?.mul(1e-3)?);
    }
    gradients.copy_from(&given)?;
    drop((given, leaves));
    Ok(Case::new(move || optimizer.step(&gradients)))
}

pub fn mlp(cpu: &Cpu, _: &str, _: &[usize]) -> Result<Case> {
    let init = Init::new(cpu, 0);
    let model = Sequential::new()
        .push(Linear::new(&init, 784, 512)?)
        .push(Relu)
        .push(Linear::new(&init, 512, 512)?)
        .push(Relu)
        .push(Linear::new(&init, 512, 10)?);
    let x = Var::new(data::normal(cpu, &[128, 784], DType::F32, 1)?);
    let y = Var::new(data::classes(cpu, &[128], 10, 2)?);
    steps(model, false, move |m| m.forward(&x)?.cross_entropy(&y, None, Default::default()))
}

/// conv 3×3 (32) – conv 3×3 (64) – max-pool 2 – 128 – 10.
#[derive(Module)]
struct Cnn<R: Runtime> {
    c1: Conv2d<R>,
    c2: Conv2d<R>,
    f1: Linear<R>,
    f2: Linear<R>,
}

pub fn cnn(cpu: &Cpu, _: &str, _: &[usize]) -> Result<Case> {
    let init = Init::new(cpu, 0);
    let model = Cnn {
        c1: Conv2d::new(&init, 1, 32, [3, 3], Default::default())?,
        c2: Conv2d::new(&init, 32, 64, [3, 3], Default::default())?,
        f1: Linear::new(&init, 64 * 12 * 12, 128)?,
        f2: Linear::new(&init, 128, 10)?,
    };
    let x = Var::new(data::normal(cpu, &[64, 1, 28, 28], DType::F32, 1)?);
    let y = Var::new(data::classes(cpu, &[64], 10, 2)?);
    steps(model, false, move |m| {
        let h = m.c2.forward(&m.c1.forward(&x)?.relu()?)?.relu()?.max_pool2d([2, 2], [2, 2], [0, 0])?;
        let logits = m.f2.forward(&m.f1.forward(&h.flatten(1, -1)?)?.relu()?)?;
        logits.cross_entropy(&y, None, Default::default())
    })
}

pub fn gpt(cpu: &Cpu, name: &str, _: &[usize]) -> Result<Case> {
    let model = Gpt::new(&Init::new(cpu, 0), GptConfig::default())?;
    if name == "gptbf16" {
        model.to_dtype(DType::BF16)?;
    }
    let tokens = data::classes(cpu, &[8, 257], 256, 1)?;
    let x = Var::new(tokens.narrow(1, 0, 256)?.contiguous()?);
    let y: Tensor<Cpu> = tokens.narrow(1, 1, 256)?.reshape([8 * 256])?;
    let y = Var::new(y);
    steps(model, true, move |m| {
        let logits = m.forward(&x)?.reshape([8 * 256, 256])?;
        let logits = logits.to_dtype(logits.spec().dtype.compute())?;
        logits.cross_entropy(&y, None, Default::default())
    })
}
