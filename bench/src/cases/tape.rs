//! The cost of an op itself: tensors of four elements.

use weftgrad::{
    Cpu, DType, Result, Var, no_grad,
    ops::{PointwiseOps, ReduceOps},
};

use super::{Case, data, fused::Drop};

const OPS: usize = 1000;

fn four(cpu: &Cpu, seed: u64, leaf: bool) -> Result<Var<Cpu>> {
    let x = data::normal(cpu, &[4], DType::F32, seed)?;
    if leaf { Var::leaf("x", x) } else { Ok(Var::new(x)) }
}

pub fn tiny_add(cpu: &Cpu, name: &str, _: &[usize]) -> Result<Case> {
    let tracked = name == "tinyadd";
    let (a, b) = (four(cpu, 1, tracked)?, four(cpu, 2, tracked)?);
    let adds = move || (0..OPS).try_for_each(|_| a.add(&b).map(drop));
    Ok(if tracked { Case::new(adds) } else { Case::new(move || no_grad(&adds)) })
}

pub fn chain(cpu: &Cpu, name: &str, _: &[usize]) -> Result<Case> {
    let (a, b, back) = (four(cpu, 1, true)?, four(cpu, 2, false)?, name == "chain");
    Ok(Case::new(move || {
        let end = (0..OPS).try_fold(a.clone(), |x, _| x.add(&b))?;
        let loss = end.sum(&[], false)?;
        if back { weftgrad::backward_with_hooks(&loss, &mut Drop) } else { Ok(()) }
    }))
}

pub fn chain_mul(cpu: &Cpu, _: &str, _: &[usize]) -> Result<Case> {
    let (a, b) = (four(cpu, 1, true)?, four(cpu, 2, true)?);
    Ok(Case::new(move || {
        let end = (0..OPS).try_fold(a.clone(), |x, _| x.mul(&b))?;
        weftgrad::backward_with_hooks(&end.sum(&[], false)?, &mut Drop)
    }))
}
