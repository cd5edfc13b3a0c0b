//! The gradients of a unit: gathered during a backward pass, summed over ranks, and what an update does with them.

use std::sync::LazyLock;

use numcore::{
    Error, Flat, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Input, ViewOps, compute},
    pointwise::Program,
};
use optim::ShardOptimizer;

use super::{UnitLayout, unit::Unit};
use crate::{
    comm::{Collectives, Communicator, ReduceOp},
    train::GradLoan,
};

/// What a rank keeps to update its shard.
pub(super) struct ShardState<R: Runtime> {
    pub(super) optimizer: Box<dyn ShardOptimizer<R>>,
    /// Summed gradients: of the shard, or of everything where gradients are not sharded.
    pub(super) grads: Flat<R>,
    /// Whether a backward pass of this step has left its sums there.
    pub(super) summed: bool,
}

impl<R: Runtime> Unit<R> {
    /// Whether gradients are in flight.
    pub(super) fn is_sending(&self) -> bool {
        self.sum.is_some()
    }

    /// Whether every gradient of this backward pass is final.
    pub(super) fn is_complete(&self) -> bool {
        self.ready.iter().all(|&ready| ready)
    }

    /// Forgets the last step's gradients, those in flight included: a step that failed left them.
    pub(super) fn forget(&mut self) {
        self.used.fill(false);
        (self.whole_grads, self.sum) = (None, None);
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
            self.whole_grads = Some(Flat::zeros_for(
                self.values.runtime(),
                MemoryCategory::Communication,
                self.layout.full().clone(),
            )?);
        }
        self.whole_grads.as_mut().map_or_else(|| Err(lost()), |flat| flat.lend(i))
    }

    /// Takes the gradient back; it is part of the step from now on.
    pub(super) fn mark_ready(&mut self, i: usize, slot: TensorMut<R>) -> Result<()> {
        self.used[i] |= slot.is_written();
        match (&mut self.whole_grads, &mut self.own) {
            (Some(flat), _) => flat.restore(slot),
            (None, Some(own)) => own.grads.restore(slot),
            (None, None) => Err(lost()),
        }
    }

    /// Sends the gradients of this backward pass; what no one wrote is zero.
    pub(super) fn send(&mut self) -> Result<()> {
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
                    true => {
                        TensorMut::alloc_for(flat.runtime(), MemoryCategory::Communication, Shape::new(&[n])?, dtype)?
                    }
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
    pub(super) fn lend_grad(&mut self) -> Result<GradLoan<R>> {
        let rank = self.rank();
        let Some(own) = &mut self.own else { return Err(lost()) };
        lend_shard(&self.layout, rank, own.grads.lend_whole()?)
    }

    /// Takes them back.
    pub(super) fn restore_grad(&mut self, sum: GradLoan<R>) -> Result<()> {
        let Some(own) = &mut self.own else { return Err(lost()) };
        own.grads.restore(TensorMut::join(sum.into_pieces())?)
    }

    /// This rank's summed gradients, a row; none if it has no piece, or everything is frozen.
    pub(super) fn gradient(&self) -> Result<Option<Tensor<R>>> {
        let Some(own) = self.own.as_ref().filter(|_| !self.pieces.is_empty()) else { return Ok(None) };
        let start = self.start(self.stage.shards_gradients());
        own.grads.whole()?.narrow(0, start, self.layout.shard()).map(Some)
    }

    /// Updates this rank's shard, which was [claimed](Unit::claim). Values elsewhere are stale then: they are gathered before they are
    /// next read. On an error the values are kept, each as it was before or after its update; [`unclaim`](Unit::unclaim) shows them.
    pub(super) fn update(&mut self, lrs: &[f64], scale: &Tensor<R>) -> Result<()> {
        if self.own.is_none() {
            return Ok(());
        }
        let updated = self.update_shard(lrs, scale);
        if updated.is_err() {
            // Who was lent the values is gone.
            self.values.reclaim();
        }
        self.leaves.iter().for_each(|leaf| leaf.touch());
        updated?;
        if self.is_sharded() { Ok(()) } else { self.prefetch() }
    }

    fn update_shard(&mut self, lrs: &[f64], scale: &Tensor<R>) -> Result<()> {
        let grads = self.gradient()?;
        let (start, n) = (self.own_start(), self.layout.shard());
        let whole = self.values.lend_whole()?;
        let numel = whole.shape().numel();
        let mut parts = whole.split(&[start, n, numel - start - n])?;
        if let (Some(own), Some(grads)) = (&mut self.own, grads) {
            let (pieces, used) = (&self.pieces, &self.used);
            let shard = parts.remove(1);
            let updated = own.optimizer.update(lrs, shard, &grads, scale, &|k| used[pieces[k].parameter])?;
            parts.insert(1, updated);
        }
        self.values.restore(TensorMut::join(parts)?)
    }
}

/// The shard of `rank` in memory of a shard alone, or of a whole unit.
fn lend_shard<R: Runtime>(layout: &UnitLayout, rank: usize, memory: TensorMut<R>) -> Result<GradLoan<R>> {
    let (n, numel) = (layout.shard(), memory.shape().numel());
    let start = if numel == n { 0 } else { layout.span(rank).start };
    Ok(GradLoan::new(memory.split(&[start, n, numel - start - n])?, 1))
}

fn lost() -> Error {
    Error::argument("ZeRO", "a gradient came back that was not asked for")
}
