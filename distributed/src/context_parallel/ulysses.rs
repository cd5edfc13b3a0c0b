//! Ulysses (Jacobs et al. 2023): each rank has some of the heads of the whole sequence while attention is computed.

use std::sync::Arc;

use autograd::{Var, apply_function};
use numcore::{
    Error, Result, Runtime,
    ops::{Apply, ViewOps, cat},
};

use super::{
    cut::{CutAttention, split_keys_values},
    masked::MaskedAttention,
    order::ZigZag,
};
use crate::{
    comm::{Comm, Communicator, Named},
    differentiable::all_to_all,
};

/// Attention between two all-to-alls: from parts of sequences to heads, and from heads back to parts of sequences.
pub(super) fn by_heads<R: Runtime>(cut: CutAttention<R>, [q, k, v]: [&Var<R>; 3]) -> Result<Var<R>> {
    let CutAttention { comm, order, op, segments, of } = cut;
    of_heads(&Named::over(&comm, &of), order, [q, k, v], |[q, k, v]| match segments {
        None => Ok(Var::apply(op.into(), &[q, k, v])?.remove(0)),
        Some(segments) => Ok(apply_function(Arc::new(MaskedAttention { op, segments }), &[q, k, v])?.remove(0)),
    })
}

/// Computes attention of this rank's heads of whole sequences.
pub(super) fn of_heads<R: Runtime>(
    comm: &Comm<R>,
    order: ZigZag,
    [q, k, v]: [&Var<R>; 3],
    attention: impl FnOnce([&Var<R>; 3]) -> Result<Var<R>>,
) -> Result<Var<R>> {
    let ranks = order.ranks;
    let [h, g] = [q, k].map(|x| x.spec().shape[1]);
    let shared = g < ranks && ranks.is_multiple_of(g.max(1));
    if !h.is_multiple_of(ranks) || !(shared || g.is_multiple_of(ranks)) {
        let why = format!(
            "{h} heads of queries and {g} of keys, as a rank has them after tensor parallelism, cannot be shared out among \
             {ranks} ranks: take `ContextExchange::AllGather`, or ranks that divide the heads"
        );
        return Err(Error::shape("attention", &[q.spec().shape, k.spec().shape], why).on_rank(comm.world_rank()));
    }
    // Several ranks have heads of queries of one group: each gets a copy of its keys and values.
    let [k, v] = if shared { [repeated(k, ranks / g)?, repeated(v, ranks / g)?] } else { [k.clone(), v.clone()] };
    let (q, both) = (to_heads(comm, order, q)?, to_heads(comm, order, &cat(&[&k, &v], -1)?)?);
    let depth = k.spec().shape[3];
    let [k, v] = split_keys_values(&both, depth)?;
    to_tokens(comm, order, &attention([&q, &k, &v])?)
}

/// Repeats each head `times` times in place: `[B, G, T, D]` to `[B, G · times, T, D]`.
fn repeated<R: Runtime>(x: &Var<R>, times: usize) -> Result<Var<R>> {
    let &[b, g, t, d] = x.spec().shape.dims() else {
        return Err(Error::shape("attention", &[x.spec().shape], "needs [B, G, T, D]"));
    };
    x.unsqueeze(2)?.broadcast_to([b, g, times, t, d])?.reshape([b, g * times, t, d])
}

/// All-to-all from all heads of a part of the sequence, `[B, H, T/c, D]`, to some heads of all of it, `[B, H/c, T, D]`.
fn to_heads<R: Runtime>(comm: &Comm<R>, order: ZigZag, x: &Var<R>) -> Result<Var<R>> {
    let (ranks, shape) = (order.ranks, x.spec().shape);
    let heads = x.reshape([shape[0], ranks, shape[1] / ranks, shape[2], shape[3]])?.transpose(0, 1)?;
    let parts = all_to_all(comm, &heads)?.chunk(0, ranks)?;
    let parts = parts.iter().map(|part| part.squeeze(0)).collect::<Result<Vec<_>>>()?;
    order.joined(&parts, 2)
}

/// All-to-all from some heads of the whole sequence, `[B, H/c, T, D]`, to all heads of a part of it, `[B, H, T/c, D]`.
fn to_tokens<R: Runtime>(comm: &Comm<R>, order: ZigZag, x: &Var<R>) -> Result<Var<R>> {
    let (ranks, shape) = (order.ranks, x.spec().shape);
    // The part of each rank, [c, B, H/c, T/c, D].
    let heads = all_to_all(comm, &order.dealt(x, 2)?)?;
    heads.transpose(0, 1)?.reshape([shape[0], ranks * shape[1], shape[2] / ranks, shape[3]])
}
