//! Attention over keys and values that are gathered in forward and again in backward, so that no rank keeps them.

use std::ops::Range;

use autograd::{Function, Var, is_grad_enabled};
use nn::parallel::SequencePart;
use numcore::{
    Result, Runtime, Tensor,
    fused::Attention,
    ops::{Apply, Backprop, PointwiseOps, ViewOps, cat},
};

use super::{
    cut::{CutAttention, split_keys_values, stacked},
    masked::gradients,
    masks::segment_mask,
    partial::{PartialAttention, merged},
    sequence::{SequenceExchange, SequenceStep},
};
use crate::comm::Communicator;

/// The attention of this rank's queries, in one or two calls a chunk, over the keys and values of all ranks.
pub(super) struct GatheredAttention<R: Runtime>(pub(super) CutAttention<R>);

/// One attention call: a range of this rank's queries, and the keys that they may see.
struct KeysSeen {
    rows: Range<usize>,
    queries: SequencePart,
    keys: Range<usize>,
    op: Attention,
}

impl<R: Runtime> GatheredAttention<R> {
    /// The attention calls of this rank. A causal chunk sees the keys up to its end; the rest is not computed. The keys
    /// before the chunk and those of the chunk are two calls, which every kernel supports, and whose results are
    /// merged. With a window, or `as_one`, they are one call, which counts queries from the end of the keys.
    fn seen(&self, as_one: bool) -> Vec<KeysSeen> {
        let CutAttention { order, op, .. } = &self.0;
        let rank = order.rank;
        if !op.causal {
            let (rows, keys) = (order.rows((0, 2)), 0..order.tokens());
            return vec![KeysSeen { rows, queries: order.part_of(rank), keys, op: op.clone() }];
        }
        let chunks = order.chunks_of(rank).into_iter().enumerate();
        let calls = chunks.flat_map(|(k, at)| {
            let rows = order.rows((k, k + 1));
            let first = op.window[0].map_or(0, |before| at.start.saturating_sub(before));
            let calls = match as_one || op.window != [None; 2] || first == at.start {
                true => {
                    let keys = first..at.end;
                    vec![(Attention { lower_right: keys.len() != at.len(), ..op.clone() }, keys)]
                }
                false => {
                    let part = |causal| Attention { causal, partial: true, ..op.clone() };
                    vec![(part(false), 0..at.start), (part(true), at.clone())]
                }
            };
            let queries = SequencePart::of(order.tokens(), [at]);
            calls.into_iter().map(move |(op, keys)| KeysSeen { rows: rows.clone(), queries: queries.clone(), keys, op })
        });
        calls.collect()
    }

    fn mask(&self, seen: &KeysSeen, like: &Tensor<R>) -> Result<Option<Tensor<R>>> {
        let of = |segments| {
            segment_mask(segments, &seen.queries, &SequencePart::of(self.0.order.tokens(), [seen.keys.clone()]), like)
        };
        self.0.segments.as_ref().map(of).transpose()
    }

    /// The exchange that gathers keys and values, concatenated along channels, or scatters their gradients.
    fn exchange(&self, what: SequenceStep, when: &str) -> SequenceExchange<R> {
        let of = format!("{}, keys and values{when}", self.0.of).into();
        SequenceExchange { what, comm: self.0.comm.clone(), order: self.0.order, of }
    }
}

impl<R: Runtime> Function<R> for GatheredAttention<R> {
    fn name(&self) -> &'static str {
        "gathered_attention"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        let (q, both) = (&ins[0], cat(&[&ins[1], &ins[2]], -1)?);
        let both = self.exchange(SequenceStep::Gather, "").run(&both)?;
        let [k, v] = split_keys_values(&both, ins[1].shape()[3])?;
        let mut rows_found: Vec<(Range<usize>, PartialAttention<R>)> = Vec::new();
        for seen in self.seen(false) {
            let [k, v] = [&k, &v].map(|x| x.narrow(2, seen.keys.start, seen.keys.len()));
            let (q, k, v, mask) = (rows(q, &seen.rows)?, k?, v?, self.mask(&seen, q)?);
            let operands: Vec<&Tensor<R>> = [&q, &k, &v].into_iter().chain(&mask).collect();
            let found = PartialAttention::of(seen.op, &operands)?;
            match rows_found.last_mut().filter(|(rows, _)| *rows == seen.rows) {
                Some((_, before)) => *before = merged(before, &found)?,
                None => rows_found.push((seen.rows, found)),
            }
        }
        let outputs = rows_found.iter().map(|(_, found)| found.o.to_dtype(q.dtype())).collect::<Result<Vec<_>>>()?;
        let sums: Vec<&Tensor<R>> = rows_found.iter().map(|(_, found)| &found.lse).collect();
        Ok(vec![stacked(&outputs)?, cat(&sums, 2)?.squeeze(-1)?])
    }

    fn always(&self) -> Option<&R> {
        Some(self.0.comm.runtime())
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let upstream = cx.grad()?;
        let [q, k, v] = [cx.input(0)?, cx.input(1)?, cx.input(2)?];
        let (o, sums) = (cx.output(Attention::OUTPUT)?, cx.output(Attention::LSE)?);
        let both = self.exchange(SequenceStep::Gather, ", again").apply(&cat(&[&k, &v], -1)?)?;
        let depth = k.spec().shape[3];
        let [k, v] = split_keys_values(&both, depth)?;
        let (mut of_queries, mut of_keys): (Vec<(Range<usize>, Var<R>)>, _) = (Vec::new(), Vec::new());
        // A gradient over some of the keys cannot be differentiated again: the sums of weights are over all keys.
        for seen in self.seen(is_grad_enabled()) {
            let [k, v] = [&k, &v].map(|x| x.narrow(2, seen.keys.start, seen.keys.len()));
            let [g, o, sums, q] = [&upstream, &o, &sums, &q].map(|x| rows(x, &seen.rows));
            let (g, o, q, k, v) = (g?, o?, q?, k?, v?);
            let mask = self.mask(&seen, &q.value()?)?;
            let mut found = gradients(&seen.op, [&g, &o, &sums?], [&q, &k, &v], mask)?;
            let own = found.remove(0);
            match of_queries.last_mut().filter(|(rows, _)| *rows == seen.rows) {
                Some((_, before)) => *before = before.add(&own)?,
                None => of_queries.push((seen.rows, own)),
            }
            of_keys.push((seen.keys, cat(&[&found[0], &found[1]], -1)?));
        }
        let of_queries: Vec<Var<R>> = of_queries.into_iter().map(|(_, gradient)| gradient).collect();
        cx.give_value(0, &stacked(&of_queries)?)?;
        // All ranks know alike which inputs are trained.
        if !(cx.wants(1) || cx.wants(2)) {
            return Ok(());
        }
        let whole = added(&of_keys, self.0.order.tokens())?;
        let [dk, dv] =
            split_keys_values(&self.exchange(SequenceStep::Scatter, ", their gradients").apply(&whole)?, depth)?;
        cx.give_value(1, &dk)?;
        cx.give_value(2, &dv)
    }
}

fn rows<T: Apply>(x: &T, rows: &Range<usize>) -> Result<T> {
    x.narrow(2, rows.start, rows.len())
}

/// The sum of values `[B, G, n, D]` of ranges of a sequence, placed in the whole sequence: `[B, G, tokens, D]`.
fn added<R: Runtime>(parts: &[(Range<usize>, Var<R>)], tokens: usize) -> Result<Var<R>> {
    let mut edges: Vec<usize> =
        parts.iter().flat_map(|(range, _)| [range.start, range.end]).chain([0, tokens]).collect();
    edges.sort_unstable();
    edges.dedup();
    let piece = |ends: &[usize]| {
        let covers = |range: &Range<usize>| range.start <= ends[0] && ends[1] <= range.end;
        let own = parts.iter().filter(|(range, _)| covers(range));
        let mut own = own.map(|(range, x)| x.narrow(2, ends[0] - range.start, ends[1] - ends[0]));
        let Some(first) = own.next().transpose()? else {
            let spec = parts[0].1.spec();
            let shape = spec.shape.with(2, ends[1] - ends[0]);
            return Ok(Var::new(Tensor::zeros(parts[0].1.runtime(), shape, spec.dtype)?));
        };
        own.try_fold(first, |sum, x| sum.add(&x?))
    };
    let pieces = edges.windows(2).map(piece).collect::<Result<Vec<_>>>()?;
    match &pieces[..] {
        [only] => Ok(only.clone()),
        pieces => cat(&pieces.iter().collect::<Vec<_>>(), 2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{comm::NoOpCommunicator, context_parallel::order::ZigZag};
    use numcore::NullRuntime;
    use std::sync::Arc;

    #[test]
    fn calls_are_plain_and_see_what_the_causal_mask_lets() {
        for (ranks, own) in [1, 2, 3, 8].into_iter().flat_map(|ranks| [4, 5].map(|own| (ranks, own))) {
            for rank in 0..ranks {
                let order = ZigZag::of(own * ranks, rank, ranks).unwrap();
                let comm = Arc::new(NoOpCommunicator::new(&NullRuntime::new()));
                let op = Attention { causal: true, ..Attention::new(1.0) };
                let of = GatheredAttention(CutAttention { comm, order, op, segments: None, of: "a".into() });
                let mut pairs = Vec::new();
                for seen in of.seen(false) {
                    assert!(seen.op.is_plain(), "{ranks} {rank}");
                    let queries = seen.queries.ranges().iter().cloned().flatten().enumerate();
                    let keys = |t: usize| seen.keys.clone().take(if seen.op.causal { t + 1 } else { usize::MAX });
                    pairs.extend(queries.flat_map(|(t, q)| keys(t).map(move |k| (q, k)).collect::<Vec<_>>()));
                }
                pairs.sort_unstable();
                let own = order.chunks_of(rank).into_iter().flatten();
                let due: Vec<_> = own.flat_map(|q| (0..=q).map(move |k| (q, k))).collect();
                assert_eq!(pairs, due, "{ranks} {rank}");
                assert!(of.seen(true).len() == 2, "{ranks} {rank}");
            }
        }
    }
}
