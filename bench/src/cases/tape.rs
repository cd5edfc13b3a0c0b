//! The overhead of an op: tensors of four elements.

use weftgrad::{
    DType, Result, Runtime, Var, no_grad,
    ops::{PointwiseOps, ReduceOps},
};

use super::{Case, data, fused::Drop};

const OPS: usize = 1000;

fn four<R: Runtime>(rt: &R, seed: u64, leaf: bool) -> Result<Var<R>> {
    let x = data::normal(rt, &[4], DType::F32, seed)?;
    if leaf { Var::leaf("x", x) } else { Ok(Var::new(x)) }
}

pub(super) fn tiny_add<R: Runtime>(rt: &R, name: &str, _: &[usize]) -> Result<Case> {
    let tracked = name == "tinyadd";
    let (a, b) = (four(rt, 1, tracked)?, four(rt, 2, tracked)?);
    let adds = move || (0..OPS).try_for_each(|_| a.add(&b).map(drop));
    Ok(if tracked { Case::new(adds) } else { Case::new(move || no_grad(&adds)) })
}

pub(super) fn chain<R: Runtime>(rt: &R, name: &str, _: &[usize]) -> Result<Case> {
    let (a, b, back) = (four(rt, 1, true)?, four(rt, 2, false)?, name == "chain");
    Ok(Case::new(move || {
        let end = (0..OPS).try_fold(a.clone(), |x, _| x.add(&b))?;
        let loss = end.sum_all()?;
        if back { weftgrad::backward_with_hooks(&loss, &mut Drop) } else { Ok(()) }
    }))
}

pub(super) fn chain_mul<R: Runtime>(rt: &R, _: &str, _: &[usize]) -> Result<Case> {
    let (a, b) = (four(rt, 1, true)?, four(rt, 2, true)?);
    Ok(Case::new(move || {
        let end = (0..OPS).try_fold(a.clone(), |x, _| x.mul(&b))?;
        weftgrad::backward_with_hooks(&end.sum_all()?, &mut Drop)
    }))
}
