//! The memory of a unit: parameters that are gathered, reduced and updated together.

use std::sync::{Arc, LazyLock};

use autograd::Leaf;
use numcore::{
    Error, Flat, Result, Runtime, Shape, Tensor, TensorMut, Use,
    ops::{Input, ViewOps, compute},
    pointwise::Program,
};
use optim::{ShardOptimizer, Shards, StatePlace};

use super::{Piece, UnitLayout, ZeroStage, options::ShardGroups};
use crate::{
    comm::{Collectives, Comm, Communicator, ReduceOp, Work, memory},
    train::LentSum,
};

/// Where the whole values are.
enum Whole<R: Runtime> {
    /// On this rank, only its shard (or, where parameters are not sharded, values that are about to be replaced).
    Absent,
    /// On their way.
    Arriving(Work<TensorMut<R>>),
    /// In the leaves.
    Present,
}

/// Parameters of one dtype that travel together.
pub(super) struct Unit<R: Runtime> {
    pub(super) name: String,
    pub(super) leaves: Vec<Arc<Leaf<R>>>,
    pub(super) layout: UnitLayout,
    /// Parameters this rank updates pieces of, and the optimizer of those; none if all are frozen.
    pub(super) own: Option<Own<R>>,
    pub(super) pieces: Vec<Piece>,
    stage: ZeroStage,
    groups: ShardGroups<R>,
    /// All values, or, where parameters are sharded, this rank's.
    pub(super) values: Flat<R>,
    whole: Whole<R>,
    whole_grads: Option<Flat<R>>,
    sum: Option<Work<TensorMut<R>>>,
    /// Leaves whose gradient is final in this sweep.
    pub(super) ready: Vec<bool>,
    pub(super) sent: bool,
    /// Leaves with a gradient in this step.
    pub(super) used: Vec<bool>,
}

/// What a rank keeps to update its shard.
pub(super) struct Own<R: Runtime> {
    pub(super) optimizer: Box<dyn ShardOptimizer<R>>,
    /// Summed gradients: of the shard, or of everything where gradients are not sharded.
    grads: Flat<R>,
    /// Whether a sweep of this step has left its sums there.
    summed: bool,
}

impl<R: Runtime> Unit<R> {
    /// Takes the values of `leaves`, one at a time, so that no more than one is there in whole beside what this rank keeps.
    pub(super) fn new(
        groups: &ShardGroups<R>,
        stage: ZeroStage,
        name: String,
        leaves: Vec<Arc<Leaf<R>>>,
        optimizer: Option<(&dyn Shards<R>, StatePlace)>,
    ) -> Result<Self> {
        let groups = groups.of(&name);
        let comm = &groups.shard;
        let rt = comm.runtime().tagged(Use::Activations);
        let (dtype, rank) = (leaves[0].spec().dtype, comm.rank());
        let parameters = leaves.iter().map(|l| (l.name().to_string(), l.spec().shape));
        let layout = UnitLayout::new(dtype, parameters, comm.size());
        let (pieces, shard) = (layout.pieces(rank), layout.shard_layout(rank)?);
        let kept = if stage.shards_parameters() { shard.clone() } else { layout.full().clone() };
        let mut values = Flat::zeros_for(&rt, Use::Parameters, kept)?;
        fill(&groups.all, &mut values, &leaves, &pieces, stage.shards_parameters())?;
        let own = match optimizer {
            None => None,
            Some((shards, place)) => {
                let group = |p: &Piece| shards.group(&leaves[p.parameter].name(), &leaves[p.parameter].spec());
                let start = if stage.shards_parameters() { 0 } else { layout.span(rank).start };
                let values = values.whole()?.narrow(0, start, shard.numel())?;
                let optimizer = shards.shard(&shard, pieces.iter().map(group).collect(), &values, place)?;
                let grads = if stage.shards_gradients() { shard } else { layout.full().clone() };
                Some(Own { optimizer, grads: Flat::zeros_for(&rt, Use::Gradients, grads)?, summed: false })
            }
        };
        let n = leaves.len();
        let mut unit = Unit {
            name,
            leaves,
            layout,
            own,
            pieces,
            stage,
            groups,
            values,
            whole: Whole::Absent,
            whole_grads: None,
            sum: None,
            ready: vec![false; n],
            sent: false,
            used: vec![false; n],
        };
        if !stage.shards_parameters() {
            unit.show(None)?;
        }
        Ok(unit)
    }

    /// The start of this rank's shard in the buffer that is kept.
    fn start(&self, sharded: bool) -> usize {
        if sharded { 0 } else { self.layout.span(self.groups.shard.rank()).start }
    }

    pub(super) fn rank(&self) -> usize {
        self.groups.shard.rank()
    }

    /// Whether only this rank's shard of the values is kept.
    pub(super) fn is_sharded(&self) -> bool {
        self.stage.shards_parameters()
    }

    /// Where this rank's shard begins in the values that are kept.
    pub(super) fn own_start(&self) -> usize {
        self.start(self.is_sharded())
    }

    /// Waits for values on their way, so that those that are kept can be read.
    pub(super) fn settle_values(&mut self) -> Result<()> {
        if self.is_sharded() { Ok(()) } else { self.fetch() }
    }

    /// Takes the values out of the leaves, to write those that are kept.
    pub(super) fn take_values(&mut self) -> Result<()> {
        self.fetch_if_arriving()?;
        self.leaves.iter().for_each(|leaf| drop(leaf.take()));
        self.whole = Whole::Absent;
        Ok(())
    }

    /// The values that are kept were written, the same on every rank where they are whole.
    pub(super) fn values_changed(&mut self) -> Result<()> {
        self.leaves.iter().for_each(|leaf| leaf.touch());
        if self.is_sharded() { Ok(()) } else { self.show(None) }
    }

    pub(super) fn is_present(&self) -> bool {
        matches!(self.whole, Whole::Present)
    }

    /// Whether gradients are on their way.
    pub(super) fn is_sending(&self) -> bool {
        self.sum.is_some()
    }

    /// Starts to gather the values, unless they are here or on their way.
    pub(super) fn prefetch(&mut self) -> Result<()> {
        if !matches!(self.whole, Whole::Absent) {
            return Ok(());
        }
        self.whole = Whole::Arriving(match self.stage.shards_parameters() {
            true => {
                let (rt, full) = (self.values.runtime(), self.layout.full());
                let out = TensorMut::alloc_for(rt, Use::Communication, Shape::new(&[full.numel()])?, full.dtype())?;
                self.groups.shard.all_gather(&self.values.whole()?, out)?
            }
            false => self.groups.shard.all_gather_in_place(self.values.lend_whole()?)?,
        });
        Ok(())
    }

    /// Waits until the values are in the leaves.
    pub(super) fn fetch(&mut self) -> Result<()> {
        self.prefetch()?;
        if let Whole::Arriving(work) = std::mem::replace(&mut self.whole, Whole::Absent) {
            let memory = work.wait()?;
            match self.stage.shards_parameters() {
                true => self.show(Some(memory.freeze()?))?,
                false => {
                    self.values.restore(memory)?;
                    self.show(None)?;
                }
            }
        }
        self.whole = Whole::Present;
        Ok(())
    }

    /// Puts the values into the leaves, as views of one buffer.
    fn show(&mut self, gathered: Option<Tensor<R>>) -> Result<()> {
        for (i, leaf) in self.leaves.iter().enumerate() {
            let value = match &gathered {
                None => self.values.tensor(i)?,
                Some(whole) => {
                    let range = self.layout.full().range(i);
                    whole.narrow(0, range.offset(), range.numel())?.reshape(*range.shape())?
                }
            };
            leaf.put(value)?;
        }
        self.whole = Whole::Present;
        Ok(())
    }

    /// Lets gathered values go. Those on their way are waited for first.
    pub(super) fn release(&mut self) -> Result<()> {
        if !self.stage.shards_parameters() {
            return Ok(());
        }
        if matches!(self.whole, Whole::Arriving(_)) {
            self.fetch()?;
        }
        self.leaves.iter().for_each(|leaf| drop(leaf.take()));
        self.whole = Whole::Absent;
        Ok(())
    }

    /// Forgets the last step's gradients.
    pub(super) fn forget(&mut self) {
        self.used.fill(false);
        self.whole_grads = None;
        if let Some(own) = &mut self.own {
            own.grads.reclaim();
            own.grads.reset();
            own.summed = false;
        }
    }

    /// Where leaf `i`'s gradient goes.
    pub(super) fn slot(&mut self, i: usize) -> Result<TensorMut<R>> {
        let Some(own) = &mut self.own else {
            let why = "was frozen when the trainer was made; make another one to train it";
            return Err(Error::state(self.leaves[i].name().to_string(), why));
        };
        if !self.stage.shards_gradients() {
            return own.grads.lend(i);
        }
        if self.whole_grads.is_none() {
            self.whole_grads =
                Some(Flat::zeros_for(self.values.runtime(), Use::Communication, self.layout.full().clone())?);
        }
        self.whole_grads.as_mut().map_or_else(|| Err(lost()), |flat| flat.lend(i))
    }

    /// Takes the gradient back; it is part of the step from now on.
    pub(super) fn settle(&mut self, i: usize, slot: TensorMut<R>) -> Result<()> {
        self.used[i] |= slot.is_written();
        match (&mut self.whole_grads, &mut self.own) {
            (Some(flat), _) => flat.restore(slot),
            (None, Some(own)) => own.grads.restore(slot),
            (None, None) => Err(lost()),
        }
    }

    /// Sends the gradients of this sweep; what no one wrote is zero.
    pub(super) fn send(&mut self) -> Result<()> {
        self.sent = true;
        if self.own.is_none() {
            return Ok(());
        }
        if self.stage.shards_gradients() && self.whole_grads.is_none() {
            let slot = self.slot(0)?;
            self.whole_grads.as_mut().map_or(Ok(()), |flat| flat.restore(slot))?;
        }
        let Some(own) = &mut self.own else { return Ok(()) };
        let flat = self.whole_grads.as_mut().unwrap_or(&mut own.grads);
        for i in (0..self.leaves.len()).filter(|&i| !flat.is_written(i)).collect::<Vec<_>>() {
            let mut slot = flat.lend(i)?;
            slot.zero()?;
            flat.restore(slot)?;
        }
        self.sum = Some(match self.whole_grads.take() {
            None => self.groups.shard.reduce_scatter_in_place(own.grads.lend_whole()?, ReduceOp::Sum)?,
            Some(flat) => {
                let (n, dtype) = (self.layout.shard(), self.layout.full().dtype());
                let out = match own.summed {
                    // The sums of an earlier micro-batch are there: these are added to them when they arrive.
                    true => TensorMut::alloc_for(flat.runtime(), Use::Communication, Shape::new(&[n])?, dtype)?,
                    false => own.grads.lend_whole()?,
                };
                self.groups.shard.reduce_scatter(&flat.whole()?, out, ReduceOp::Sum)?
            }
        });
        Ok(())
    }

    /// Waits until the sums of the last [`send`](Unit::send) are there.
    pub(super) fn collect(&mut self) -> Result<()> {
        let (Some(work), Some(own)) = (self.sum.take(), &mut self.own) else { return Ok(()) };
        let mut sums = work.wait()?;
        if let Some(replicas) = &self.groups.replicas {
            let mut lent = lend_shard(&self.layout, self.groups.shard.rank(), sums)?;
            let own = replicas.all_reduce(lent.take(), ReduceOp::Sum)?.wait()?;
            lent.give(own);
            sums = TensorMut::join(lent.into_pieces())?;
        }
        if self.stage.shards_gradients() && own.summed {
            let sums = sums.freeze()?;
            let mut kept = own.grads.lend_whole()?;
            static ADD: LazyLock<Program> = LazyLock::new(|| Program::new("add", |[a, b], []| [a + b]));
            let rt = kept.runtime().clone();
            compute(&rt, &ADD, &[Input::Own(0), Input::Value(&sums)], &[], &mut [&mut kept])?;
            return own.grads.restore(kept);
        }
        own.summed = true;
        own.grads.restore(sums)
    }

    /// Takes out this rank's summed gradients.
    pub(super) fn lend_sum(&mut self) -> Result<LentSum<R>> {
        let rank = self.rank();
        let Some(own) = &mut self.own else { return Err(lost()) };
        lend_shard(&self.layout, rank, own.grads.lend_whole()?)
    }

    /// Takes them back.
    pub(super) fn restore_sum(&mut self, sum: LentSum<R>) -> Result<()> {
        let Some(own) = &mut self.own else { return Err(lost()) };
        own.grads.restore(TensorMut::join(sum.into_pieces())?)
    }

    /// This rank's summed gradients, a row; none if it has no piece, or everything is frozen.
    pub(super) fn gradient(&self) -> Result<Option<Tensor<R>>> {
        let Some(own) = self.own.as_ref().filter(|_| !self.pieces.is_empty()) else { return Ok(None) };
        let start = self.start(self.stage.shards_gradients());
        own.grads.whole()?.narrow(0, start, self.layout.shard()).map(Some)
    }

    /// Updates this rank's shard. Values elsewhere are stale then: they are gathered before they are next read.
    pub(super) fn update(&mut self, lrs: &[f64], scale: &Tensor<R>) -> Result<()> {
        let grads = self.gradient()?;
        if self.own.is_none() {
            return Ok(());
        }
        self.take_values()?;
        let (start, n) = (self.start(self.stage.shards_parameters()), self.layout.shard());
        let whole = self.values.lend_whole()?;
        let numel = whole.shape().numel();
        let mut parts = whole.split(&[start, n, numel - start - n])?;
        if let (Some(own), Some(grads)) = (&mut self.own, grads) {
            let (pieces, used) = (&self.pieces, &self.used);
            let shard = parts.remove(1);
            let updated = own.optimizer.update(lrs, shard, &grads, scale, &|k| used[pieces[k].parameter])?;
            parts.insert(1, updated);
        }
        self.values.restore(TensorMut::join(parts)?)?;
        self.leaves.iter().for_each(|leaf| leaf.touch());
        if !self.stage.shards_parameters() {
            self.prefetch()?;
        }
        Ok(())
    }

    fn fetch_if_arriving(&mut self) -> Result<()> {
        if matches!(self.whole, Whole::Arriving(_)) { self.fetch() } else { Ok(()) }
    }
}

/// The shard of `rank` in memory of a shard alone, or of a whole unit.
fn lend_shard<R: Runtime>(layout: &UnitLayout, rank: usize, memory: TensorMut<R>) -> Result<LentSum<R>> {
    let (n, numel) = (layout.shard(), memory.shape().numel());
    let start = if numel == n { 0 } else { layout.span(rank).start };
    Ok(LentSum::new(memory.split(&[start, n, numel - start - n])?, 1))
}

/// Takes what is kept of rank 0's values, one parameter after another: only one is there in whole beside what is kept.
fn fill<R: Runtime>(
    all: &Comm<R>,
    values: &mut Flat<R>,
    leaves: &[Arc<Leaf<R>>],
    pieces: &[Piece],
    sharded: bool,
) -> Result<()> {
    let copy = |values: &mut Flat<R>, k: usize, value: &Tensor<R>| {
        let mut range = values.lend(k)?;
        range.reset();
        range.accumulate(&numcore::ops::Op::identity(), &[value])?;
        values.restore(range)
    };
    for (i, leaf) in leaves.iter().enumerate() {
        let value = all.broadcast(memory(&leaf.value()?)?, 0)?.wait()?.freeze()?;
        if !sharded {
            copy(values, i, &value)?;
        }
        for (k, piece) in pieces.iter().enumerate().filter(|(_, p)| sharded && p.parameter == i) {
            let row = value.contiguous()?.reshape([value.shape().numel()])?;
            copy(values, k, &row.narrow(0, piece.elements.start, piece.elements.len())?)?;
        }
        drop(leaf.take());
    }
    Ok(())
}

fn lost() -> Error {
    Error::argument("ZeRO", "a gradient came back that was not asked for")
}
