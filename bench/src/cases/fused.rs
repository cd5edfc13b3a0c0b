//! Fused operations, forward and backward.

use weftgrad::{
    Backward, BackwardHook, Leaf, LeafGrad, NnOps, Result, Runtime, Tensor, Var,
    fused::AttentionProgram,
    ops::{Apply, MatmulOps, PointwiseOps},
};

use super::{Case, data};

/// A hook that drops every gradient.
pub(super) struct Drop;

impl<R: Runtime> BackwardHook<R> for Drop {
    fn on_leaf_grad_ready(&mut self, _: &std::sync::Arc<Leaf<R>>, _: LeafGrad<R>) -> Result<()> {
        Ok(())
    }
}

/// Applies the op of a case to `x`, with weight and bias of ones and zeros where it has them.
fn apply<T: Apply>(name: &str, x: &T, weight: &T, bias: &T) -> Result<T> {
    match name.trim_end_matches("fb").trim_end_matches("bf16") {
        "softmax" => x.softmax(-1),
        "layernorm" => x.layer_norm(Some(weight), Some(bias), 1e-5),
        "rmsnorm" => x.rms_norm(Some(weight), f64::from(f32::EPSILON)),
        "gelu" => x.gelu(),
        "gelutanh" => x.gelu_tanh(),
        _ => x.tanh(),
    }
}

fn parameters<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<(Tensor<R>, Tensor<R>)> {
    let (width, dtype) = (n[n.len() - 1], data::dtype_of(name));
    Ok((Tensor::ones(rt, [width], dtype)?, Tensor::zeros(rt, [width], dtype)?))
}

pub(super) fn forward<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let (x, (w, b), name) = (data::normal(rt, n, data::dtype_of(name), 1)?, parameters(rt, name, n)?, name.to_owned());
    Ok(Case::new(move || apply(&name, &x, &w, &b).map(drop)))
}

pub(super) fn forward_backward<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let x = Var::leaf("x", data::normal(rt, n, data::dtype_of(name), 1)?)?;
    let (w, b) = parameters(rt, name, n)?;
    let (w, b) = (Var::leaf("weight", w)?, Var::leaf("bias", b)?);
    let (g, name) = (Var::new(data::normal(rt, n, data::dtype_of(name), 2)?), name.to_owned());
    Ok(Case::new(move || Backward::from(&apply(&name, &x, &w, &b)?, &g)?.run(&mut Drop)))
}

pub(super) fn cross_entropy<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let logits = data::normal(rt, n, data::dtype_of(name), 1)?;
    let target = Var::new(data::classes(rt, &n[..1], n[1], 2)?);
    let back = name.ends_with("fb");
    let x = if back { Var::leaf("x", logits)? } else { Var::new(logits) };
    Ok(Case::new(move || {
        let loss = x.cross_entropy(&target)?;
        if back { loss_backward(&loss) } else { Ok(()) }
    }))
}

/// A linear layer with its bias and a residual, from `[M, K]` to `[M, N]`.
pub(super) fn linear<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let (back, dtype) = (name.ends_with("fb"), data::dtype_of(name));
    let input = |name: &str, shape: &[usize], seed| {
        let x = data::normal(rt, shape, dtype, seed)?;
        if back { Var::leaf(name, x) } else { Ok(Var::new(x)) }
    };
    let (x, w) = (input("x", &[n[0], n[1]], 1)?, input("weight", &[n[2], n[1]], 2)?);
    let (bias, residual) = (input("bias", &[n[2]], 3)?, input("residual", &[n[0], n[2]], 4)?);
    let g = Var::new(data::normal(rt, &[n[0], n[2]], dtype, 5)?);
    Ok(Case::new(move || {
        let y = x.linear_onto(&w, Some(&bias), &residual)?;
        if back { Backward::from(&y, &g)?.run(&mut Drop) } else { Ok(()) }
    }))
}

fn loss_backward<R: Runtime>(loss: &Var<R>) -> Result<()> {
    Backward::of(loss)?.run(&mut Drop)
}

pub(super) fn attention<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let back = name.ends_with("fb");
    let dtype = data::dtype_of(name);
    let input = |i: u64| {
        let x = data::normal(rt, n, dtype, i)?;
        if back { Var::leaf("x", x) } else { Ok(Var::new(x)) }
    };
    let (q, k, v) = (input(1)?, input(2)?, input(3)?);
    let g = Var::new(data::normal(rt, n, dtype, 4)?);
    let program = scores(name, n[2]);
    Ok(Case::new(move || {
        let o = match &program {
            Some(program) => program.attend(&q, &k, &v, &[])?,
            None => q.causal_attention(&k, &v)?,
        };
        if back { Backward::from(&o, &g)?.run(&mut Drop) } else { Ok(()) }
    }))
}

/// The programs of attention's cases, for sequences of `tokens`: every key, the causal mask, eight documents, causal
/// ALiBi, and a causal soft cap.
fn scores(name: &str, tokens: usize) -> Option<AttentionProgram> {
    let all = || AttentionProgram::over(0);
    let document = (tokens / 8).max(1) as i64;
    Some(match name.strip_suffix("fb").unwrap_or(name) {
        "attnfull" => all(),
        "attnprogram" => AttentionProgram::causal(),
        "attndocs" => all().mask(move |at, _| (at.key / document).eq(at.query / document)),
        "attnalibi" => AttentionProgram::causal().score(|s, at, _| s + (at.key - at.query).cast_like(s) * 0.01),
        "attncap" => AttentionProgram::causal().score(|s, _, _| (s * 0.05).tanh() * 20.0),
        _ => return None,
    })
}
