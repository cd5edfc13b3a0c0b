//! The values of a unit: kept by this rank, gathered, put into the leaves, and taken over if replaced from outside.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{ErrorKind, Flat, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut, ops::ViewOps};

use super::{Piece, unit::Unit};
use crate::comm::{Collectives, Comm, Work, memory};

/// The state of a unit's unsharded values.
///
/// | from | by | to |
/// |---|---|---|
/// | `Absent` | [`prefetch`](Unit::prefetch) | `Arriving` |
/// | `Arriving` | [`wait_gathered`](Unit::wait_gathered) | `Present` |
/// | `Absent` | [`show`](Unit::show), of values that this rank has | `Present` |
/// | `Present` | [`hide`](Unit::hide), after a last use, or before the values are written | `Absent` |
pub(super) enum GatheredValues<R: Runtime> {
    /// This rank has its shard alone. Where parameters are not sharded, the values are about to be replaced.
    Absent,
    /// Values in flight.
    Arriving(Work<TensorMut<R>>),
    /// Values in the leaves: the tensor put into each.
    Present(Vec<Tensor<R>>),
}

impl<R: Runtime> Unit<R> {
    pub(super) fn is_present(&self) -> bool {
        matches!(self.whole, GatheredValues::Present(_))
    }

    /// Makes the kept values readable: waits for those in flight, and takes over replaced ones.
    pub(super) fn ready_values(&mut self) -> Result<()> {
        if !self.is_sharded() {
            self.fetch()?;
        }
        self.adopt()
    }

    /// Takes the values out of the leaves, before the kept values are written.
    pub(super) fn take_values(&mut self) -> Result<()> {
        self.wait_gathered()?;
        self.adopt()?;
        self.hide();
        Ok(())
    }

    /// Takes the values, like [`take_values`](Unit::take_values), before an update with these learning rates. An error
    /// if the update could not begin, for example because the memory of values or state has another holder.
    pub(super) fn claim(&mut self, lrs: &[f64]) -> Result<()> {
        if self.own.is_none() {
            return Ok(());
        }
        self.take_values()?;
        self.require_sole("step")?;
        let Some(own) = &mut self.own else { return Ok(()) };
        // All memory that an update brings to the device is allocated at once.
        let _brought = (self.values.reserve()?, own.grads.reserve()?);
        own.optimizer.check(lrs)
    }

    /// Puts the values back into the leaves after [`claim`](Unit::claim), if the unit was not updated.
    pub(super) fn unclaim(&mut self) -> Result<()> {
        let claimed = !self.is_sharded() && matches!(self.whole, GatheredValues::Absent);
        if claimed { self.show(None) } else { Ok(()) }
    }

    /// An error if values or state could not be written, because their memory has another holder.
    pub(super) fn check_sole(&mut self, op: &'static str) -> Result<()> {
        self.wait_gathered()?;
        self.adopt()?;
        if !self.is_sharded() {
            self.hide();
        }
        let sole = self.require_sole(op);
        let sole = sole.and_then(|()| self.own.as_mut().map_or(Ok(()), |own| own.optimizer.check_sole()));
        sole.and(self.unclaim())
    }

    /// An error if the memory of the kept values has another holder.
    fn require_sole(&mut self, op: &'static str) -> Result<()> {
        if self.values.is_on_host() {
            return Ok(());
        }
        let values = self.values.brought()?;
        match values.lend_whole() {
            Ok(memory) => values.restore(memory),
            Err(_) => {
                let what = format!("one of the parameters of the unit `{}`", self.name);
                Err(ErrorKind::Shared { op, what }.into())
            }
        }
    }

    /// The value of leaf `i`, of a unit that is present. For a leaf whose value was taken out it is the value put
    /// there: the leaf would ask the unit for it again.
    pub(super) fn value(&self, i: usize) -> Result<Tensor<R>> {
        let leaf = &self.leaves[i];
        match &self.whole {
            GatheredValues::Present(shown) if !leaf.is_resident() => Ok(shown[i].clone()),
            GatheredValues::Present(_) => leaf.value(),
            _ => Err(ErrorKind::NotResident { name: leaf.name().to_string() }.into()),
        }
    }

    /// Publishes kept values that were written. Where each rank keeps all of them, they must be equal on every rank.
    pub(super) fn values_changed(&mut self) -> Result<()> {
        self.leaves.iter().for_each(|leaf| leaf.touch());
        self.publish()
    }

    /// Publishes kept values: where each rank keeps all of them, the leaves have them again.
    pub(super) fn publish(&mut self) -> Result<()> {
        if self.is_sharded() { Ok(()) } else { self.show(None) }
    }

    /// Starts to gather the values, unless they are present or in flight.
    pub(super) fn prefetch(&mut self) -> Result<()> {
        if !matches!(self.whole, GatheredValues::Absent) {
            return Ok(());
        }
        self.adopt()?;
        self.whole = GatheredValues::Arriving(match self.is_sharded() {
            true => {
                let (rt, full) = (self.values.runtime(), self.layout.full());
                let out = TensorMut::alloc_for(
                    rt,
                    MemoryCategory::Communication,
                    Shape::new(&[full.numel()])?,
                    full.dtype(),
                )?;
                self.groups.shard.all_gather_parts(&self.values.whole()?, self.layout.shards(), out)?
            }
            false if !self.layout.cuts() => {
                let span = self.layout.span(self.rank());
                let own = self.values.whole()?.narrow(0, span.start, span.len())?.copy()?;
                let out = self.values.brought()?.lend_whole()?;
                self.groups.shard.all_gather_parts(&own, self.layout.shards(), out)?
            }
            false => self.groups.shard.all_gather_in_place(self.values.brought()?.lend_whole()?)?,
        });
        Ok(())
    }

    /// Waits until the values are in the leaves.
    pub(super) fn fetch(&mut self) -> Result<()> {
        self.prefetch()?;
        self.wait_gathered()
    }

    /// Releases gathered values. Values in flight are waited for first.
    pub(super) fn release(&mut self) -> Result<()> {
        if !self.is_sharded() {
            return Ok(());
        }
        self.wait_gathered()?;
        self.adopt()?;
        self.hide();
        Ok(())
    }

    /// Takes over values that were put into leaves from outside ([`Leaf::set`], a state dict): they are the parameters'
    /// from now on. Every rank must have been given equal ones, since each keeps its part of its own.
    pub(super) fn adopt(&mut self) -> Result<()> {
        if self.replaced()?.is_empty() {
            return Ok(());
        }
        // Transfers in flight read or write the memory that the new values go to.
        self.wait_gathered()?;
        let replaced = self.replaced()?;
        if self.is_sharded() {
            for (i, value) in replaced {
                self.keep(i, &value)?;
                match &mut self.whole {
                    GatheredValues::Present(shown) => shown[i] = value,
                    _ => drop(self.leaves[i].take()),
                }
            }
            return Ok(());
        }
        let present = self.is_present();
        self.hide();
        let kept = replaced.iter().try_for_each(|(i, value)| self.keep(*i, value));
        if present {
            self.show(None)?;
        }
        if kept.is_err() {
            replaced.into_iter().try_for_each(|(i, value)| self.leaves[i].put(value))?;
        }
        kept
    }

    /// Values in leaves that this unit did not put there.
    fn replaced(&self) -> Result<Vec<(usize, Tensor<R>)>> {
        let mut replaced = Vec::new();
        for (i, leaf) in self.leaves.iter().enumerate().filter(|(_, leaf)| leaf.is_resident()) {
            let value = leaf.value()?;
            let own = match &self.whole {
                GatheredValues::Present(shown) => {
                    shown[i].shares_memory_with(&value) && shown[i].layout() == value.layout()
                }
                _ => false,
            };
            if !own {
                replaced.push((i, value));
            }
        }
        Ok(replaced)
    }

    /// Keeps this rank's part of parameter `i`'s new value.
    fn keep(&mut self, i: usize, value: &Tensor<R>) -> Result<()> {
        if !self.is_sharded() {
            self.values.write(|values| overwrite(values, i, value))?;
        }
        let row = value.contiguous()?.reshape([value.shape().numel()])?;
        for (k, piece) in self.pieces.iter().enumerate().filter(|(_, piece)| piece.parameter == i) {
            let part = row.narrow(0, piece.elements.start, piece.elements.len())?;
            if self.is_sharded() {
                self.values.write(|values| overwrite(values, k, &part))?;
            }
            if let Some(own) = &mut self.own {
                own.optimizer.adopt(k, &part)?;
            }
        }
        Ok(())
    }

    /// Waits for values in flight, and puts them into the leaves.
    pub(super) fn wait_gathered(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.whole, GatheredValues::Absent) {
            GatheredValues::Arriving(work) => {
                let memory = work.wait()?;
                if self.is_sharded() {
                    return self.show(Some(memory.freeze()?));
                }
                self.values.brought()?.restore(memory)?;
                self.show(None)
            }
            other => {
                self.whole = other;
                Ok(())
            }
        }
    }

    /// Takes all values out of the leaves.
    fn hide(&mut self) {
        self.leaves.iter().for_each(|leaf| drop(leaf.take()));
        self.whole = GatheredValues::Absent;
    }

    /// Puts the values into the leaves, as views of one buffer. A value that was put there from outside meanwhile
    /// stays: it is newer.
    pub(super) fn show(&mut self, gathered: Option<Tensor<R>>) -> Result<()> {
        let mut shown = Vec::with_capacity(self.leaves.len());
        for (i, leaf) in self.leaves.iter().enumerate() {
            let value = match &gathered {
                None => self.values.tensor(i)?,
                Some(whole) => {
                    let range = self.layout.full().range(i);
                    whole.narrow(0, range.offset(), range.numel())?.reshape(*range.shape())?
                }
            };
            if !leaf.is_resident() {
                leaf.put(value.clone())?;
            }
            shown.push(value);
        }
        self.whole = GatheredValues::Present(shown);
        Ok(())
    }
}

/// Fills the kept values of this rank with rank 0's, one parameter after another. At most one parameter is in memory
/// beside the kept values.
pub(super) fn fill<R: Runtime>(
    all: &Comm<R>,
    values: &mut Flat<R>,
    leaves: &[Arc<Leaf<R>>],
    pieces: &[Piece],
    sharded: bool,
) -> Result<()> {
    for (i, leaf) in leaves.iter().enumerate() {
        let value = all.broadcast(memory(&leaf.value()?)?, 0)?.wait()?.freeze()?;
        if !sharded {
            overwrite(values, i, &value)?;
        }
        for (k, piece) in pieces.iter().enumerate().filter(|(_, p)| sharded && p.parameter == i) {
            let row = value.contiguous()?.reshape([value.shape().numel()])?;
            overwrite(values, k, &row.narrow(0, piece.elements.start, piece.elements.len())?)?;
        }
        drop(leaf.take());
    }
    Ok(())
}

/// Replaces range `k`.
pub(super) fn overwrite<R: Runtime>(flat: &mut Flat<R>, k: usize, value: &Tensor<R>) -> Result<()> {
    flat.overwrite(k, &value.reshape(*flat.layout().range(k).shape())?)
}
