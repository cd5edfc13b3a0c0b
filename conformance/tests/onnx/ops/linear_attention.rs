//! Linear attention: a state that each step decays, corrects and writes to.

use numcore::{
    DType, Tensor,
    ops::{MatmulOps, PointwiseOps, RepeatOps, ViewOps, stack},
};

use super::attention::{heads, merged};
use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    if c.op() != "LinearAttention" { Ok(None) } else { linear(c).map(Some) }
}

fn linear(c: &Call<'_>) -> Answer<Vec<T>> {
    let of = c.x(0)?.dtype();
    let (many, few) = (c.int("q_num_heads", 1) as usize, c.int("kv_num_heads", 1) as usize);
    let part = |i: usize, count: usize| -> Answer<T> { Ok(heads(&c.x(i)?.to_dtype(DType::F32)?, count)?) };
    let (q, k, v) = (part(0, many)?, part(1, few)?, part(2, few)?);
    let decay = c.opt(4).map(|x| heads(&x.to_dtype(DType::F32)?, few)?.exp()).transpose()?;
    let beta = c.opt(5).map(|x| heads(&x.to_dtype(DType::F32)?, x.dims()[2])).transpose()?;
    let (depth, width) = (q.dims()[3], v.dims()[3]);
    let mut state = match c.opt(3) {
        Some(past) => past.to_dtype(DType::F32)?,
        None => Tensor::zeros(c.cpu(), [q.dims()[0], few, depth, width], DType::F32)?,
    };
    let scale = Some(c.float("scale", 0.0)).filter(|&s| s != 0.0).unwrap_or(1.0 / (depth as f64).sqrt());
    let mut outs = Vec::new();
    for t in 0..q.dims()[2] {
        // Keys as columns, values as rows.
        let key = k.select(2, t)?.unsqueeze(-1)?;
        let mut value = v.select(2, t)?.unsqueeze(-2)?;
        if let Some(decay) = &decay {
            state = state.mul(&decay.select(2, t)?.unsqueeze(-1)?)?;
        }
        if let Some(beta) = &beta {
            value = value.sub(&key.t()?.matmul(&state)?)?.mul(&beta.select(2, t)?.unsqueeze(-1)?)?;
        }
        state = state.add(&key.mul(&value)?)?;
        let read = state.repeat_interleave(many / few, 1)?;
        outs.push(q.select(2, t)?.unsqueeze(-2)?.matmul(&read)?.squeeze(-2)?.mul(scale)?);
    }
    let y = merged(&stack(&outs.iter().collect::<Vec<_>>(), 2)?)?.to_dtype(of)?;
    Ok(vec![y, state.to_dtype(c.opt(3).map_or(of, |past| past.dtype()))?])
}
