//! Ring attention (Liu et al. 2023): blocks of keys and values travel from rank to rank during the attention over the
//! last one.
//!
//! The attention of queries over a block of keys is `o` and the log-sum-exp of its scores; two of them are merged by
//! these ([`merged`]). In backward the sums over all keys are known, so each block gives its part of every gradient
//! independently. A block's gradient follows the block around the ring, and is home after as many hops.

use autograd::{Function, Var, is_grad_enabled};
use nn::parallel::SequencePart;
use numcore::{
    ErrorKind, Result, Runtime, Shape, Tensor, TensorMut,
    fused::{Attention, AttentionGrad},
    ops::{Apply, Backprop, PointwiseOps, ViewOps, cat},
};

use super::{
    cut::{CutAttention, split_keys_values, stacked},
    masks::{segment_mask, window_mask},
    order::ZigZag,
    partial::{PartialAttention, merged},
};
use crate::comm::{Collectives, Communicator, Named, Work};

/// The attention of this rank's queries over the blocks of keys and values that pass by.
pub(super) struct RingAttention<R: Runtime>(pub(super) CutAttention<R>);

/// The chunks that a step computes with, of the two that each rank has: 0 is the early one, 1 the late one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingStep {
    /// The rank whose keys and values are on this rank now.
    owner: usize,
    queries: (usize, usize),
    keys: (usize, usize),
    causal: bool,
}

const BOTH: (usize, usize) = (0, 2);
const EARLY: (usize, usize) = (0, 1);
const LATE: (usize, usize) = (1, 2);

/// The computation of step `j`, with the block that has made `j` hops. The early chunks of earlier ranks come before
/// all queries of this rank, and their late ones after. Both chunks of later ranks come between this rank's two.
fn step(order: ZigZag, causal: bool, j: usize) -> RingStep {
    let ZigZag { rank, ranks, .. } = order;
    let owner = (rank + ranks - j) % ranks;
    let (queries, keys) = match () {
        () if !causal || owner == rank => (BOTH, BOTH),
        () if owner < rank => (BOTH, EARLY),
        () => (LATE, BOTH),
    };
    RingStep { owner, queries, keys, causal: causal && owner == rank }
}

impl<R: Runtime> RingAttention<R> {
    fn step(&self, j: usize) -> RingStep {
        step(self.0.order, self.0.op.causal, j)
    }

    /// The pieces in which sums over steps are kept: single chunks if some steps compute with one chunk of queries
    /// alone.
    fn pieces(&self) -> &'static [(usize, usize)] {
        if self.0.op.causal { &[EARLY, LATE] } else { &[BOTH] }
    }

    /// Adds a step's result for some chunks to the sum of each piece of them.
    fn add_pieces<T>(
        &self,
        sums: &mut Vec<Option<T>>,
        (first, end): (usize, usize),
        piece: impl Fn((usize, usize)) -> Result<T>,
        add: impl Fn(T, T) -> Result<T>,
    ) -> Result<()> {
        sums.resize_with(self.pieces().len(), || None);
        for (sum, &(from, to)) in
            sums.iter_mut().zip(self.pieces()).filter(|(_, (from, to))| first <= *from && *to <= end)
        {
            let own = piece((from, to))?;
            *sum = Some(match sum.take() {
                Some(before) => add(before, own)?,
                None => own,
            });
        }
        Ok(())
    }

    /// The attention call of a step, and its mask.
    fn call(&self, step: RingStep, like: &Tensor<R>) -> Result<(Attention, Option<Tensor<R>>)> {
        let chunks = |rank: usize, (from, to): (usize, usize)| {
            SequencePart::of(self.0.order.tokens(), self.0.order.chunks_of(rank)[from..to].to_vec())
        };
        let (queries, keys) = (chunks(self.0.order.rank, step.queries), chunks(step.owner, step.keys));
        let of = |segments: &Tensor<R>| segment_mask(segments, &queries, &keys, like);
        let documents = self.0.segments.as_ref().map(of).transpose()?;
        // Chunks of a block are apart, so its window is no band of the scores.
        let near = self.0.op.window[0].map(|before| window_mask(before, &queries, &keys, like)).transpose()?;
        let mask = match (documents, near) {
            (Some(documents), Some(near)) => Some(documents.add(&near)?),
            (documents, near) => documents.or(near),
        };
        let op = self.0.op.clone();
        Ok((Attention { causal: step.causal, window: [None; 2], masked: mask.is_some(), partial: true, ..op }, mask))
    }

    /// The chunks `at` of a value of both, `[.., n, D]`.
    fn chunks(&self, x: &Tensor<R>, at: (usize, usize)) -> Result<Tensor<R>> {
        self.chunks_from(x, BOTH, at)
    }

    /// The chunks `at` of a value of the chunks `all`.
    fn chunks_from(&self, x: &Tensor<R>, all: (usize, usize), at: (usize, usize)) -> Result<Tensor<R>> {
        let (all, at) = (self.0.order.rows(all), self.0.order.rows(at));
        x.narrow(2, at.start - all.start, at.len())
    }

    /// Starts to send `x` to the next rank, and to receive the previous rank's value.
    fn pass_on(&self, x: &Tensor<R>, when: &str) -> Result<InFlight<R>> {
        let (rank, ranks) = (self.0.order.rank, self.0.order.ranks);
        let comm = Named::over(&self.0.comm, &format!("{}, {when}", self.0.of));
        let out = TensorMut::alloc(x.runtime(), Shape::new(&[x.shape().numel()])?, x.dtype())?;
        let work = comm.send_recv(x, (rank + 1) % ranks, out, (rank + ranks - 1) % ranks)?;
        Ok(InFlight { work, shape: *x.shape() })
    }

    /// The attention of the chunks of one step.
    fn found(&self, step: RingStep, q: &Tensor<R>, both: &Tensor<R>, depth: usize) -> Result<PartialAttention<R>> {
        let [k, v] = split_keys_values(&self.chunks(both, step.keys)?, depth)?;
        let (q, (op, mask)) = (self.chunks(q, step.queries)?, self.call(step, q)?);
        let operands: Vec<&Tensor<R>> = [&q, &k, &v].into_iter().chain(&mask).collect();
        PartialAttention::of(op, &operands)
    }

    /// The gradients that one step gives queries, and keys and values concatenated along channels, in the type of
    /// computation.
    fn gradients(&self, step: RingStep, saved: &SavedByRing<R>, both: &Tensor<R>) -> Result<[Tensor<R>; 2]> {
        let [k, v] = split_keys_values(&self.chunks(both, step.keys)?, saved.depth)?;
        let [g, o, q] = [&saved.g, &saved.o, &saved.q].map(|x| self.chunks(x, step.queries));
        // Kernels read contiguous sums.
        let (g, o, q, lse) = (g?, o?, q?, self.chunks(&saved.lse, step.queries)?.contiguous()?);
        let (op, mask) = self.call(step, &q)?;
        let operands: Vec<&Tensor<R>> = [&g, &o, &lse, &q, &k, &v].into_iter().chain(&mask).collect();
        let found = Tensor::apply(AttentionGrad(op).into(), &operands)?;
        let wide = q.dtype().compute();
        Ok([found[0].to_dtype(wide)?, cat(&[&found[1], &found[2]], -1)?.to_dtype(wide)?])
    }

    /// Adds `x`, a value of some chunks, to a sum over both chunks; without a sum, the other chunk is zeros.
    fn added(&self, sum: Option<Tensor<R>>, x: Tensor<R>, (from, to): (usize, usize)) -> Result<Tensor<R>> {
        if (from, to) == BOTH {
            return sum.map_or(Ok(x.clone()), |sum| sum.add(&x));
        }
        let other = if from == 0 { LATE } else { EARLY };
        let (some, rest) = match sum {
            Some(sum) => (self.chunks(&sum, (from, to))?.add(&x)?, self.chunks(&sum, other)?),
            None => {
                let rest = x.shape().with(2, self.0.order.rows(other).len());
                (x.clone(), Tensor::zeros(x.runtime(), rest, x.dtype())?)
            }
        };
        if from == 0 { cat(&[&some, &rest], 2) } else { cat(&[&rest, &some], 2) }
    }
}

/// A value on its way around the ring.
struct InFlight<R: Runtime> {
    work: Work<TensorMut<R>>,
    shape: Shape,
}

impl<R: Runtime> InFlight<R> {
    fn arrived(self) -> Result<Tensor<R>> {
        self.work.wait()?.freeze()?.reshape(self.shape)
    }
}

/// The tensors that backward reads.
struct SavedByRing<R: Runtime> {
    g: Tensor<R>,
    q: Tensor<R>,
    o: Tensor<R>,
    lse: Tensor<R>,
    depth: usize,
}

impl<R: Runtime> Function<R> for RingAttention<R> {
    fn name(&self) -> &'static str {
        "ring_attention"
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        let (q, depth, ranks) = (&ins[0], ins[1].shape()[3], self.0.order.ranks);
        let (mut both, mut sums) = (cat(&[&ins[1], &ins[2]], -1)?, Vec::new());
        for j in 0..ranks {
            let next = (j + 1 < ranks).then(|| self.pass_on(&both, "keys and values")).transpose()?;
            let step = self.step(j);
            let found = self.found(step, q, &both, depth)?;
            let of = |x, at| self.chunks_from(x, step.queries, at);
            let piece = |at| Ok(PartialAttention { o: of(&found.o, at)?, lse: of(&found.lse, at)? });
            self.add_pieces(&mut sums, step.queries, piece, |before, own| merged(&before, &own))?;
            if let Some(next) = next {
                both = next.arrived()?;
            }
        }
        let sums: Vec<PartialAttention<R>> = sums.into_iter().flatten().collect();
        let outputs = sums.iter().map(|piece| piece.o.to_dtype(q.dtype())).collect::<Result<Vec<_>>>()?;
        let sums: Vec<&Tensor<R>> = sums.iter().map(|piece| &piece.lse).collect();
        Ok(vec![stacked(&outputs)?, cat(&sums, 2)?.squeeze(-1)?])
    }

    fn always(&self) -> Option<&R> {
        Some(self.0.comm.runtime())
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        if is_grad_enabled() {
            let why =
                "a ring of keys and values cannot be differentiated twice; take `ContextExchange::AllGather`".into();
            return Err(ErrorKind::NoGradient { op: "ring_attention", why }.into());
        }
        let [k, v] = [cx.input(1)?.value()?, cx.input(2)?.value()?];
        let saved = SavedByRing {
            g: cx.grad()?.value()?,
            q: cx.input(0)?.value()?,
            o: cx.output(Attention::OUTPUT)?.value()?,
            lse: cx.output(Attention::LSE)?.value()?,
            depth: k.shape()[3],
        };
        // All ranks know alike which inputs are trained.
        let (ranks, keys_too) = (self.0.order.ranks, cx.wants(1) || cx.wants(2));
        let (mut both, mut of_queries, mut home, mut travelling) = (cat(&[&k, &v], -1)?, Vec::new(), None, None);
        for j in 0..ranks {
            let next = (j + 1 < ranks).then(|| self.pass_on(&both, "keys and values, again")).transpose()?;
            let step = self.step(j);
            let [dq, dkv] = self.gradients(step, &saved, &both)?;
            let piece = |at| self.chunks_from(&dq, step.queries, at);
            self.add_pieces(&mut of_queries, step.queries, piece, |sum, own| sum.add(&own))?;
            if j == 0 {
                home = Some(dkv);
            } else if keys_too {
                // The gradient of this block, as summed by the ranks before this one.
                let before = travelling.take().map(InFlight::arrived).transpose()?;
                travelling = Some(self.pass_on(&self.added(before, dkv, step.keys)?, "their gradients")?);
            }
            if let Some(next) = next {
                both = next.arrived()?;
            }
        }
        let of_queries: Vec<_> =
            of_queries.into_iter().flatten().map(|dq| dq.to_dtype(saved.q.dtype())).collect::<Result<_>>()?;
        cx.give_value(0, &Var::new(stacked(&of_queries)?))?;
        let others = travelling.map(InFlight::arrived).transpose()?;
        let Some(home) = home.filter(|_| keys_too) else { return Ok(()) };
        let dkv = others.map_or(Ok(home.clone()), |others| home.add(&others))?;
        let [dk, dv] = split_keys_values(&dkv, saved.depth)?;
        cx.give_value(1, &Var::new(dk.to_dtype(k.dtype())?))?;
        cx.give_value(2, &Var::new(dv.to_dtype(v.dtype())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_the_causal_mask_and_equal_work() {
        for ranks in [1, 2, 3, 4, 5, 8] {
            for rank in 0..ranks {
                let order = ZigZag::of(2 * ranks, rank, ranks).unwrap();
                let mut seen = Vec::new();
                for j in 0..ranks {
                    let step = step(order, true, j);
                    let [queries, keys] = [(rank, step.queries), (step.owner, step.keys)].map(|(rank, (from, to))| {
                        order.chunks_of(rank)[from..to].iter().map(|chunk| chunk.start).collect::<Vec<_>>()
                    });
                    let sees = |q: usize, k: usize| !step.causal || k <= q;
                    let pairs = queries.iter().flat_map(|&q| keys.iter().map(move |&k| (q, k)));
                    seen.extend(pairs.filter(|&(q, k)| sees(q, k)));
                    // Two whole chunks by a chunk in each step but the first, which has two halves and a whole.
                    assert_eq!(queries.len() * keys.len(), if j == 0 { 4 } else { 2 });
                }
                seen.sort_unstable();
                let own = order.chunks_of(rank).map(|chunk| chunk.start);
                let all: Vec<_> = own.iter().flat_map(|&q| (0..=q).map(move |k| (q, k))).collect();
                assert_eq!(seen, all, "rank {rank} of {ranks}");
            }
        }
    }
}
