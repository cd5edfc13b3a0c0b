//! Linear attention: a state that each step decays, corrects and writes to.

use autograd::Var;
use numcore::{
    DType, Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps, RepeatOps, ViewOps, stack},
};

use super::{
    super::call::{NodeCall, NodeOutputs, array, bad},
    OperatorRow,
    attention::{heads, merged},
    row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "LinearAttention" => row(&["kv_num_heads", "q_num_heads", "scale", "update_rule", "chunk_size"], linear),
        _ => None,
    }
}

fn linear<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let of = c.x(0)?.dtype();
    let (many, few) = (c.size("q_num_heads", 1)?, c.size("kv_num_heads", 1)?);
    let part = |i: usize, count: usize| heads(&c.x(i)?.to_dtype(DType::F32)?, count);
    let (q, k, v) = (part(0, many)?, part(1, few)?, part(2, few)?);
    let decay = c.opt(4)?.map(|x| heads(&x.to_dtype(DType::F32)?, few)?.exp()).transpose()?;
    let beta = match c.opt(5)? {
        Some(x) => Some(heads(&x.to_dtype(DType::F32)?, x.dims().last().copied().unwrap_or(0))?),
        None => None,
    };
    let ([batch, _, steps, depth], [.., width]) =
        (array::<usize, 4>("queries", &q.dims())?, array::<usize, 4>("values", &v.dims())?);
    if few == 0 || steps == 0 {
        return Err(bad("has no heads or no tokens"));
    }
    let mut state = match c.opt(3)? {
        Some(past) => past.to_dtype(DType::F32)?,
        None => Var::new(Tensor::zeros(c.device(), [batch, few, depth, width], DType::F32)?),
    };
    let scale = Some(c.float("scale", 0.0)).filter(|&s| s != 0.0).unwrap_or(1.0 / (depth as f64).sqrt());
    let mut outs = Vec::new();
    for t in 0..steps {
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
    let kept = c.opt(3)?.map_or(of, |past| past.dtype());
    Ok(vec![y, state.to_dtype(kept)?])
}
