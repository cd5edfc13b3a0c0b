//! The reducer that sends buckets compressed by PowerSGD.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use autograd::Leaf;
use distributed::{
    buckets::{BucketReducer, FullBucket, TotalWeight},
    checkpoint::{CheckpointPart, Wanted},
    comm::{Collectives, Comm, Communicator, ReduceOp, Work},
    strategy::LossWeight,
};
use numcore::{
    DType, Error, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Input, Op, Pointwise, ViewOps, compute},
};

use super::{PowerSgd, matrix::LowRankGrad};

/// A reducer that sends each bucket in two rounds: uncompressed gradients together with `P`, then `Q`. Its state is by
/// parameter, not by bucket, so buckets may be cut anew.
pub(super) struct Compressor<R: Runtime> {
    pub(super) comm: Comm<R>,
    pub(super) options: PowerSgd,
    /// The state of compressed parameters by leaf id, made at a parameter's first compressed send.
    pub(super) matrices: HashMap<usize, LowRankGrad<R>>,
    /// The number of steps that were exchanged.
    pub(super) steps: u64,
    sent: BTreeMap<usize, InFlightBucket<R>>,
    weight: TotalWeight<R>,
    /// True if the step may be skipped after its exchange.
    skippable: bool,
    /// True on a single rank, where a failed step does not end the run: the changes of that step are undone.
    alone: bool,
}

/// The pieces of a bucket that was sent, and the exchanges of its gradients, `P` and `Q`.
struct InFlightBucket<R: Runtime> {
    comm: Comm<R>,
    /// The row of the bucket in pieces, gaps included; parameters are the odd ones.
    pieces: Vec<TensorMut<R>>,
    /// The leaf id of each parameter that is compressed, none for others.
    ids: Vec<Option<usize>>,
    plain: Option<Work<TensorMut<R>>>,
    p: Option<Work<TensorMut<R>>>,
    q: Option<Work<TensorMut<R>>>,
    bases: Vec<Tensor<R>>,
}

impl<R: Runtime> Compressor<R> {
    /// Makes the reducer. On one rank, a step that is not taken is undone before the next. On more, a failed step ends
    /// the communicator, and no memory is spent on undoing it.
    pub(super) fn new(comm: &Comm<R>, options: PowerSgd) -> Self {
        Compressor {
            comm: comm.clone(),
            options,
            matrices: HashMap::new(),
            steps: 0,
            sent: BTreeMap::new(),
            weight: TotalWeight::new(comm),
            skippable: false,
            alone: comm.size() == 1,
        }
    }

    /// The id of a parameter if this step sends it compressed.
    fn compressed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<usize>> {
        if self.steps < self.options.start_iter || self.options.compressed(&leaf.spec().shape).is_none() {
            return Ok(None);
        }
        self.matrix(leaf)?;
        Ok(Some(leaf.id()))
    }

    /// The state of a parameter, made if needed; none if its shape is not compressed.
    pub(super) fn matrix(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<&mut LowRankGrad<R>>> {
        let spec = leaf.spec();
        let Some(form) = self.options.compressed(&spec.shape) else { return Ok(None) };
        if !self.matrices.contains_key(&leaf.id()) {
            let seed = self.options.seed.wrapping_add(u64::from(crc32fast::hash(leaf.name().as_bytes())));
            self.matrices.insert(leaf.id(), LowRankGrad::new(self.comm.runtime(), form, spec.dtype, seed)?);
        }
        Ok(self.matrices.get_mut(&leaf.id()))
    }

    /// Sends the gradients that are not compressed, in one row.
    fn send_plain(
        &self,
        comm: &Comm<R>,
        pieces: &[TensorMut<R>],
        ids: &[Option<usize>],
    ) -> Result<Option<Work<TensorMut<R>>>> {
        let plain: Vec<&TensorMut<R>> =
            (0..ids.len()).filter(|&i| ids[i].is_none()).map(|i| &pieces[2 * i + 1]).collect();
        let Some(first) = plain.first() else { return Ok(None) };
        let lens: Vec<usize> = plain.iter().map(|p| p.shape().numel()).collect();
        let mut parts = self.row(lens.iter().sum(), first.dtype())?.split(&lens)?;
        let copy = Pointwise::identity().program;
        for (from, to) in plain.into_iter().zip(&mut parts) {
            compute(comm.runtime(), &copy, &[Input::Memory(from)], &[], &mut [to])?;
        }
        comm.all_reduce(TensorMut::join(parts)?, ReduceOp::Sum).map(Some)
    }

    fn send_p(
        &mut self,
        bucket: FullBucket<'_, R>,
        pieces: &[TensorMut<R>],
        ids: &[Option<usize>],
    ) -> Result<Option<Work<TensorMut<R>>>> {
        let Some((mut parts, weight)) = self.cut(ids, |m| m.sizes().0)?.zip(Some(self.total()?)) else {
            return Ok(None);
        };
        let compressed = (0..ids.len()).filter_map(|i| Some((i, ids[i]?)));
        for ((i, id), p) in compressed.zip(&mut parts) {
            let undoable =
                self.skippable || bucket.may_be_unused || self.alone || !bucket.members[i].leaf.requires_grad();
            known(&mut self.matrices, id)?.begin(&pieces[2 * i + 1], &weight, undoable, p)?;
        }
        bucket.comm.all_reduce(TensorMut::join(parts)?, ReduceOp::Sum).map(Some)
    }

    /// Waits for bucket `k`'s `P` and sends its `Q`, unless that is done.
    fn turn(&mut self, k: usize) -> Result<()> {
        let Some(mut sent) = self.sent.remove(&k) else { return Ok(()) };
        if let Some(p) = sent.p.take()
            && let Some(mut parts) = self.cut(&sent.ids, |m| m.sizes().1)?
        {
            let (p, mut at) = (p.wait()?.freeze()?, 0);
            for (id, q) in sent.ids.iter().flatten().zip(&mut parts) {
                let matrix = known(&mut self.matrices, *id)?;
                let len = matrix.sizes().0;
                sent.bases.push(matrix.turn(&p.narrow(0, at, len)?, q)?);
                at += len;
            }
            sent.q = Some(sent.comm.all_reduce(TensorMut::join(parts)?, ReduceOp::Sum)?);
        }
        self.sent.insert(k, sent);
        Ok(())
    }

    /// Allocates a row with a part for each compressed parameter; none if there is no such parameter.
    fn cut(&self, ids: &[Option<usize>], len: impl Fn(&LowRankGrad<R>) -> usize) -> Result<Option<Vec<TensorMut<R>>>> {
        let matrices: Vec<&LowRankGrad<R>> = ids.iter().flatten().filter_map(|id| self.matrices.get(id)).collect();
        let Some(first) = matrices.first() else { return Ok(None) };
        let lens: Vec<usize> = matrices.iter().map(|m| len(m)).collect();
        self.row(lens.iter().sum(), first.dtype())?.split(&lens).map(Some)
    }

    fn row(&self, numel: usize, dtype: DType) -> Result<TensorMut<R>> {
        TensorMut::alloc_for(self.comm.runtime(), MemoryCategory::Communication, Shape::new(&[numel])?, dtype)
    }

    /// The total weight of all ranks' losses; 1 if no weight was set in this step.
    fn total(&mut self) -> Result<Tensor<R>> {
        self.weight.get(1.0)
    }
}

impl<R: Runtime> BucketReducer<R> for Compressor<R> {
    /// Sends a bucket in two rounds; sending the next bucket starts the second round.
    fn send(&mut self, bucket: FullBucket<'_, R>, row: TensorMut<R>) -> Result<()> {
        let FullBucket { number, comm, members, .. } = bucket;
        let (mut lens, mut end) = (Vec::new(), 0);
        for member in members {
            lens.extend([member.at.start - end, member.at.len()]);
            end = member.at.end;
        }
        lens.push(row.shape().numel() - end);
        let pieces = row.split(&lens)?;
        let ids = members.iter().map(|m| self.compressed(&m.leaf)).collect::<Result<Vec<_>>>()?;
        let plain = self.send_plain(comm, &pieces, &ids)?;
        let p = self.send_p(bucket, &pieces, &ids)?;
        let comm = comm.clone();
        self.sent.insert(number, InFlightBucket { comm, pieces, ids, plain, p, q: None, bases: Vec::new() });
        number.checked_sub(1).map_or(Ok(()), |before| self.turn(before))
    }

    fn wait(&mut self, number: usize) -> Result<TensorMut<R>> {
        // All sent buckets in order: the same calls on every rank, whichever bucket is waited for first.
        self.sent.keys().copied().collect::<Vec<_>>().into_iter().try_for_each(|k| self.turn(k))?;
        let Some(mut sent) = self.sent.remove(&number) else {
            return Err(Error::internal("PowerSgd", format!("bucket {number} was not sent")));
        };
        sent.take_plain()?;
        if let Some(q) = sent.q.take() {
            let (q, weight, mut at) = (q.wait()?.freeze()?, self.total()?, 0);
            let compressed = sent.ids.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?)));
            for ((i, id), p) in compressed.zip(&sent.bases) {
                let matrix = known(&mut self.matrices, id)?;
                let len = matrix.sizes().1;
                matrix.end(p, &q.narrow(0, at, len)?, &weight, &mut sent.pieces[2 * i + 1])?;
                at += len;
            }
        }
        TensorMut::join(sent.pieces)
    }

    /// Undoes the changes of the last step if it was skipped.
    fn begin_step(&mut self) {
        self.matrices.values_mut().for_each(LowRankGrad::undo);
        self.sent.clear();
        self.weight.clear();
        self.skippable = false;
    }

    /// Starts the sum of the loss weights over ranks.
    fn set_loss_weight(&mut self, losses: LossWeight) -> Result<()> {
        self.skippable = losses.skippable;
        self.weight.begin(losses.weight * losses.scale)
    }

    /// Undoes the changes to parameters that no rank used: they have sent nothing.
    fn end_step(&mut self, unused: &[&Arc<Leaf<R>>]) {
        for leaf in unused {
            self.matrices.get_mut(&leaf.id()).into_iter().for_each(LowRankGrad::undo);
        }
        if !self.skippable && !self.alone {
            self.matrices.values_mut().for_each(LowRankGrad::keep);
        }
        self.steps += 1;
    }

    fn has_state() -> bool {
        true
    }

    fn step_taken(&mut self) {
        self.matrices.values_mut().for_each(LowRankGrad::keep);
    }

    fn parts(&self, leaves: &[Arc<Leaf<R>>]) -> Result<Vec<CheckpointPart<R>>> {
        self.saved_parts(leaves)
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        self.saved_numbers()
    }

    fn wanted(&self, leaves: &[Arc<Leaf<R>>]) -> Result<Vec<Wanted>> {
        self.wanted_parts(leaves)
    }

    fn restore(
        &mut self,
        leaves: &[Arc<Leaf<R>>],
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        self.resume(leaves, read, numbers)
    }
}

impl<R: Runtime> InFlightBucket<R> {
    /// Waits for the uncompressed gradients, and copies them into their slots.
    fn take_plain(&mut self) -> Result<()> {
        let Some(plain) = self.plain.take() else { return Ok(()) };
        let (plain, mut at) = (plain.wait()?.freeze()?, 0);
        for i in (0..self.ids.len()).filter(|&i| self.ids[i].is_none()) {
            let slot = &mut self.pieces[2 * i + 1];
            let own = plain.narrow(0, at, slot.shape().numel())?;
            at += slot.shape().numel();
            slot.reset();
            slot.accumulate(&Op::identity(), &[&own])?;
        }
        Ok(())
    }
}

fn known<R: Runtime>(matrices: &mut HashMap<usize, LowRankGrad<R>>, id: usize) -> Result<&mut LowRankGrad<R>> {
    matrices.get_mut(&id).ok_or_else(|| Error::internal("PowerSgd", "an unknown parameter was sent"))
}
