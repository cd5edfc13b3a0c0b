//! The gradients of a unit: gathered during a backward pass, summed over ranks, and used by the update.

use numcore::{
    Error, Flat, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Op, PointwiseOps, ViewOps},
};
use optim::{ShardOptimizer, UpdatePhase};

use super::{UnitLayout, kept::Kept, options::UnitOptions, unit::Unit};
use crate::{
    comm::{Collectives, Communicator, ReduceOp, Work},
    strategy::{GradLoan, PartialSums, TensorAxis},
};

/// The state that a rank needs to update its shard.
pub(super) struct ShardState<R: Runtime> {
    pub(super) optimizer: Box<dyn ShardOptimizer<R>>,
    /// Gradients of the shard. Where gradients are not sharded they are those of the whole unit, written and summed in
    /// place.
    pub(super) grads: Kept<R>,
}

/// The state of a unit's gradients in a step. With `reduce_once` it is `Filling` over several passes.
///
/// | from | by | to |
/// |---|---|---|
/// | any | [`forget`](Unit::forget), before a step | `Clear` |
/// | `Clear`, `Reduced`, `Filling` | [`slot`](Unit::slot), where gradients are sharded | `Filling` |
/// | `Clear`, `Filling`, `Reduced` | [`send`](Unit::send) | `Reducing` |
/// | `Reducing` | [`collect`](Unit::collect) | `Reduced` |
pub(super) enum UnitGradients<R: Runtime> {
    /// No backward pass of this step has left sums. Where gradients are not sharded, passes may have written their own.
    Clear,
    /// Unsharded gradients of the current backward pass or, with `reduce_once`, of the step so far. `summed` is true if
    /// earlier passes of the step have left their sums in the shard.
    Filling { whole: Flat<R>, summed: bool },
    /// Sums over ranks in flight; `summed` as in `Filling`.
    Reducing { sums: Work<TensorMut<R>>, summed: bool },
    /// The shard has the sums of the step so far.
    Reduced,
}

impl<R: Runtime> UnitGradients<R> {
    /// Takes out the unsharded gradients of the current pass, or those that `alloc` makes if it has written none. The
    /// `bool` is true if there are sums of earlier passes.
    fn take(&mut self, alloc: impl FnOnce() -> Result<Flat<R>>) -> Result<(Flat<R>, bool)> {
        match std::mem::replace(self, UnitGradients::Clear) {
            UnitGradients::Filling { whole, summed } => Ok((whole, summed)),
            UnitGradients::Clear => Ok((alloc()?, false)),
            UnitGradients::Reduced => Ok((alloc()?, true)),
            UnitGradients::Reducing { .. } => {
                Err(Error::internal("ZeRO", "a gradient was written while the sums of the pass before were in flight"))
            }
        }
    }
}

impl<R: Runtime> Unit<R> {
    /// Tells whether gradients are in flight.
    pub(super) fn is_sending(&self) -> bool {
        matches!(self.gradients, UnitGradients::Reducing { .. })
    }

    /// Tells whether every gradient of this backward pass is final.
    pub(super) fn is_complete(&self) -> bool {
        self.ready.iter().all(|&ready| ready)
    }

    /// Discards the last step's gradients, including those that a failed step left in flight.
    pub(super) fn forget(&mut self) {
        self.used.fill(false);
        self.gradients = UnitGradients::Clear;
        self.partial = PartialSums::default();
        if let Some(own) = &mut self.own {
            own.grads.forget();
        }
    }

    /// Lends the memory for the gradient of leaf `i`.
    pub(super) fn slot(&mut self, i: usize) -> Result<TensorMut<R>> {
        self.begun[i] = true;
        let Some(own) = &mut self.own else {
            let why = "was frozen when the step began; unfreeze it between steps";
            return Err(Error::state(self.leaves[i].name().to_string(), why));
        };
        if !self.options.stage.shards_gradients() {
            return own.grads.brought()?.lend(i);
        }
        let (mut whole, summed) = self.take_whole()?;
        let slot = whole.lend(i);
        self.gradients = UnitGradients::Filling { whole, summed };
        slot
    }

    /// Tells whether a backward pass can write gradients in place: their memory has the parameters' dtype.
    pub(super) fn lends_slots(&self) -> bool {
        let dtype = self.layout.full().dtype();
        self.options.whole(dtype) == dtype
    }

    /// Memory for the unsharded gradients of a backward pass, or of the passes so far. The `bool` is true if the shard
    /// has sums of earlier passes.
    fn take_whole(&mut self) -> Result<(Flat<R>, bool)> {
        let (rt, full) = (self.values.runtime(), self.layout.full());
        let full = full.with_dtype(self.options.whole(full.dtype()));
        // Gradients of one pass live until they are sent; those of a step are accounted as gradients.
        let once = self.options.reduce_once;
        let category = if once { MemoryCategory::Gradients } else { MemoryCategory::Communication };
        self.gradients.take(|| Flat::zeros_for(rt, category, full))
    }

    /// Takes back the gradient of leaf `i`, which counts in the step from now on.
    pub(super) fn mark_ready(&mut self, i: usize, slot: TensorMut<R>) -> Result<()> {
        self.used[i] |= slot.is_written();
        match (&mut self.gradients, &mut self.own) {
            (UnitGradients::Filling { whole, .. }, _) => whole.restore(slot),
            (_, Some(own)) => own.grads.brought()?.restore(slot),
            (_, None) => Err(lost()),
        }
    }

    /// Marks all trained parameters as used in this step.
    pub(super) fn mark_used(&mut self) {
        self.used.iter_mut().zip(&self.leaves).for_each(|(used, leaf)| *used = leaf.requires_grad());
    }

    /// Sends the gradients of this backward pass. Parameters without a gradient are zero.
    pub(super) fn send(&mut self) -> Result<()> {
        let (shards, UnitOptions { sent, kept, .. }) = (self.options.stage.shards_gradients(), self.options);
        let taken = if shards && self.own.is_some() { Some(self.take_whole()?) } else { None };
        let Some(own) = &mut self.own else { return Ok(()) };
        let (shard, summed) = (&self.groups.shard, taken.as_ref().is_some_and(|(_, summed)| *summed));
        let sums = match taken {
            None if sent == kept && self.layout.cuts() => {
                let grads = own.grads.brought()?;
                zero_unwritten(grads)?;
                shard.reduce_scatter_in_place(grads.lend_whole()?, ReduceOp::Sum)?
            }
            taken => {
                let whole = match taken {
                    Some((mut whole, _)) => {
                        zero_unwritten(&mut whole)?;
                        whole.whole()?
                    }
                    None => {
                        let grads = own.grads.brought()?;
                        zero_unwritten(grads)?;
                        grads.whole()?
                    }
                };
                let out = match shards && sent == kept && !summed && !own.grads.is_on_host() {
                    true => own.grads.brought()?.lend_whole()?,
                    // Arriving sums are converted, added to the sums of earlier passes, or copied to the host.
                    false => {
                        let shape = Shape::new(&[self.layout.shards()[shard.rank()]])?;
                        TensorMut::alloc_for(whole.runtime(), MemoryCategory::Communication, shape, sent)?
                    }
                };
                shard.reduce_scatter_parts(&whole.to_dtype(sent)?, self.layout.shards(), out, ReduceOp::Sum)?
            }
        };
        self.gradients = UnitGradients::Reducing { sums, summed };
        Ok(())
    }

    /// Waits until the sums of the last [`send`](Unit::send) have arrived; false if none were in flight.
    pub(super) fn collect(&mut self) -> Result<bool> {
        if !self.is_sending() {
            return Ok(false);
        }
        let before = std::mem::replace(&mut self.gradients, UnitGradients::Clear);
        let (UnitGradients::Reducing { sums, summed }, Some(own)) = (before, &mut self.own) else {
            return Err(lost());
        };
        let mut sums = sums.wait()?;
        if let Some(replicas) = &self.groups.replicas {
            let mut lent = lend_shard(&self.layout, self.groups.shard.rank(), sums)?;
            let own = replicas.all_reduce(lent.take(), ReduceOp::Sum)?.wait()?;
            lent.give(own);
            sums = TensorMut::join(lent.into_pieces())?;
        }
        let shards = self.options.stage.shards_gradients();
        let in_place = self.options.sent == self.options.kept && (shards || self.layout.cuts());
        match own.grads.is_on_host() {
            true if !summed => own.grads.store(&sums.freeze()?.to_dtype(self.options.kept)?)?,
            false if !summed && in_place => own.grads.brought()?.restore(sums)?,
            _ => {
                let start = if shards { 0 } else { self.layout.span(self.groups.shard.rank()).start };
                let sums = sums.freeze()?;
                own.grads.write(|grads| add_sums(grads, start, &sums, summed))?;
            }
        }
        self.gradients = UnitGradients::Reduced;
        Ok(true)
    }

    /// Starts the sums of gradients of which ranks along tensor have parts. These ranks cut the unit alike, so each
    /// sums its shard with the equal shards of the others. Gradients that are kept in host memory are summed before
    /// this returns.
    pub(super) fn start_partial(&mut self, tensor: &TensorAxis<R>) -> Result<()> {
        let Some(own) = &mut self.own else { return Ok(()) };
        let shards = self.options.stage.shards_gradients();
        let mut lent = Vec::new();
        for (k, piece) in self.pieces.iter().enumerate() {
            let leaf = &self.leaves[piece.parameter];
            if tensor.is_partial(leaf) {
                let memory = own.grads.brought()?.lend(if shards { k } else { piece.parameter })?;
                lent.push((leaf.clone(), memory));
            }
        }
        self.partial.start(tensor, lent)?;
        if own.grads.is_on_host() { self.end_partial() } else { Ok(()) }
    }

    /// Waits for the sums that [`start_partial`](Unit::start_partial) started.
    pub(super) fn end_partial(&mut self) -> Result<()> {
        let Some(own) = self.own.as_mut().filter(|_| !self.partial.is_empty()) else { return Ok(()) };
        own.grads.write(|grads| self.partial.wait(|_, sum| grads.restore(sum)))
    }

    /// Lends this rank's summed gradients.
    pub(super) fn lend_grad(&mut self) -> Result<GradLoan<R>> {
        let rank = self.rank();
        let Some(own) = &mut self.own else { return Err(lost()) };
        let mut lent = lend_shard(&self.layout, rank, own.grads.brought()?.lend_whole()?)?;
        // A unit of a tied parameter has no other.
        if !self.used.contains(&true) {
            lent.reset();
        }
        Ok(lent)
    }

    /// Takes back gradients that [`lend_grad`](Unit::lend_grad) gave.
    pub(super) fn restore_grad(&mut self, mut sum: GradLoan<R>) -> Result<()> {
        let Some(own) = &mut self.own else { return Err(lost()) };
        self.used.fill(sum.is_written());
        if !sum.is_written() {
            sum.zero()?;
        }
        own.grads.brought()?.restore(TensorMut::join(sum.into_pieces())?)?;
        own.grads.put_away()
    }

    /// This rank's summed gradients, a row; none if it has no piece, or all parameters are frozen.
    pub(super) fn gradient(&self) -> Result<Option<Tensor<R>>> {
        let Some(own) = self.own.as_ref().filter(|_| !self.pieces.is_empty()) else { return Ok(None) };
        let start = self.start(self.options.stage.shards_gradients());
        own.grads.whole()?.narrow(0, start, self.layout.shards()[self.rank()]).map(Some)
    }

    /// Updates this rank's shard, which was [claimed](Unit::claim). Values on other ranks are stale then, and gathered
    /// before their next read. After an error each value is as before or as after its update;
    /// [`unclaim`](Unit::unclaim) shows them.
    pub(super) fn update(&mut self, lrs: &[f64], scale: &Tensor<R>) -> Result<()> {
        if self.own.is_none() {
            return Ok(());
        }
        let updated = self.run(lrs, scale, &mut UpdatePhase::Change);
        self.leaves.iter().for_each(|leaf| leaf.touch());
        updated?;
        if self.is_sharded() { Ok(()) } else { self.prefetch() }
    }

    /// Runs a phase of an update of this rank's shard.
    pub(super) fn run(&mut self, lrs: &[f64], scale: &Tensor<R>, phase: &mut UpdatePhase<'_, R>) -> Result<()> {
        let run = self.run_shard(lrs, scale, phase);
        if run.is_err() {
            // The borrower of the values is gone.
            self.values.reclaim();
        }
        run
    }

    fn run_shard(&mut self, lrs: &[f64], scale: &Tensor<R>, phase: &mut UpdatePhase<'_, R>) -> Result<()> {
        if self.own.is_none() {
            return Ok(());
        }
        let grads = self.gradient()?;
        let (start, n) = (self.own_start(), self.layout.shards()[self.rank()]);
        let whole = self.values.brought()?.lend_whole()?;
        let numel = whole.shape().numel();
        let mut parts = whole.split(&[start, n, numel - start - n])?;
        if let (Some(own), Some(grads)) = (&mut self.own, grads) {
            let (pieces, used) = (&self.pieces, &self.used);
            let shard = parts.remove(1);
            let updated = own.optimizer.update(lrs, shard, &grads, scale, &|k| used[pieces[k].parameter], phase)?;
            parts.insert(1, updated);
        }
        self.values.brought()?.restore(TensorMut::join(parts)?)?;
        self.values.put_away()
    }
}

/// Writes sums into `grads` from `start` on, in the dtype of `grads`. Adds them to the present values if `add`.
fn add_sums<R: Runtime>(grads: &mut Flat<R>, start: usize, sums: &Tensor<R>, add: bool) -> Result<()> {
    let (convert, n) = (Op::cast(sums.dtype(), grads.layout().dtype()), sums.shape().numel());
    let whole = grads.lend_whole()?;
    let rest = whole.shape().numel() - start - n;
    let mut parts = whole.split(&[start, n, rest])?;
    if !add {
        parts[1].reset();
    }
    let done = parts[1].accumulate(&convert, &[sums]);
    grads.restore(TensorMut::join(parts)?)?;
    done
}

/// Zeroes the ranges that were not written.
fn zero_unwritten<R: Runtime>(flat: &mut Flat<R>) -> Result<()> {
    for i in 0..flat.layout().len() {
        if !flat.is_written(i) {
            let mut slot = flat.lend(i)?;
            slot.zero()?;
            flat.restore(slot)?;
        }
    }
    Ok(())
}

/// Lends the shard of `rank` from memory of a shard alone, or of a whole unit.
fn lend_shard<R: Runtime>(layout: &UnitLayout, rank: usize, memory: TensorMut<R>) -> Result<GradLoan<R>> {
    let (n, numel) = (layout.shards()[rank], memory.shape().numel());
    let start = if numel == n { 0 } else { layout.span(rank).start };
    Ok(GradLoan::new(memory.split(&[start, n, numel - start - n])?, 1))
}

fn lost() -> Error {
    Error::internal("ZeRO", "a gradient was returned that was not requested")
}
