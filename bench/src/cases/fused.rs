//! Fused operations, forward and backward.

use weftgrad::{
    Backward, BackwardHook, Cpu, DType, Leaf, LeafGrad, NnOps, Result, Tensor, Var,
    ops::{Apply, PointwiseOps},
};

use super::{Case, data};

/// A hook that drops every gradient.
pub struct Drop;

impl BackwardHook<Cpu> for Drop {
    fn on_leaf_grad_ready(&mut self, _: &std::sync::Arc<Leaf<Cpu>>, _: LeafGrad<Cpu>) -> Result<()> {
        Ok(())
    }
}

/// What a case computes of `x`, with weight and bias of ones and zeros where it has them.
fn apply<T: Apply>(name: &str, x: &T, weight: &T, bias: &T) -> Result<T> {
    match name.trim_end_matches("fb") {
        "softmax" => x.softmax(-1),
        "layernorm" => x.layer_norm(Some(weight), Some(bias), 1e-5),
        "rmsnorm" => x.rms_norm(Some(weight), f64::from(f32::EPSILON)),
        "gelu" => x.gelu(),
        "gelutanh" => x.gelu_tanh(),
        _ => x.tanh(),
    }
}

fn parameters(cpu: &Cpu, n: &[usize]) -> Result<(Tensor<Cpu>, Tensor<Cpu>)> {
    let width = n[n.len() - 1];
    Ok((Tensor::ones(cpu, [width], DType::F32)?, Tensor::zeros(cpu, [width], DType::F32)?))
}

pub fn forward(cpu: &Cpu, name: &str, n: &[usize]) -> Result<Case> {
    let (x, (w, b), name) = (data::normal(cpu, n, DType::F32, 1)?, parameters(cpu, n)?, name.to_owned());
    Ok(Case::new(move || apply(&name, &x, &w, &b).map(drop)))
}

pub fn forward_backward(cpu: &Cpu, name: &str, n: &[usize]) -> Result<Case> {
    let x = Var::leaf("x", data::normal(cpu, n, DType::F32, 1)?)?;
    let (w, b) = parameters(cpu, n)?;
    let (w, b) = (Var::leaf("weight", w)?, Var::leaf("bias", b)?);
    let (g, name) = (Var::new(data::normal(cpu, n, DType::F32, 2)?), name.to_owned());
    Ok(Case::new(move || Backward::from(&apply(&name, &x, &w, &b)?, &g)?.run(&mut Drop)))
}

pub fn cross_entropy(cpu: &Cpu, name: &str, n: &[usize]) -> Result<Case> {
    let logits = data::normal(cpu, n, DType::F32, 1)?;
    let target = Var::new(data::classes(cpu, &n[..1], n[1], 2)?);
    let back = name.ends_with("fb");
    let x = if back { Var::leaf("x", logits)? } else { Var::new(logits) };
    Ok(Case::new(move || {
        let loss = x.cross_entropy(&target, None, Default::default())?;
        if back { loss_backward(&loss) } else { Ok(()) }
    }))
}

fn loss_backward(loss: &Var<Cpu>) -> Result<()> {
    Backward::of(loss)?.run(&mut Drop)
}

pub fn attention(cpu: &Cpu, name: &str, n: &[usize]) -> Result<Case> {
    let back = name.ends_with("fb");
    let input = |i: u64| {
        let x = data::normal(cpu, n, DType::F32, i)?;
        if back { Var::leaf("x", x) } else { Ok(Var::new(x)) }
    };
    let (q, k, v) = (input(1)?, input(2)?, input(3)?);
    let g = Var::new(data::normal(cpu, n, DType::F32, 4)?);
    Ok(Case::new(move || {
        let o = q.attention(&k, &v, None, true, None)?;
        if back { Backward::from(&o, &g)?.run(&mut Drop) } else { Ok(()) }
    }))
}
