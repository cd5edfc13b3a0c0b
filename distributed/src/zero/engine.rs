//! All units of a model: the times at which they are gathered, and the order in which gradients are reduced.

use std::{collections::HashMap, sync::Arc};

use autograd::{Leaf, LeafGrad};
use numcore::{Result, Runtime, Tensor, TensorMut, ops::Op};

use optim::{Shards, StatePlace};

use super::{
    ZeroOptions,
    order::{ReadOrder, SendOrder},
    unit::Unit,
};
use crate::{
    comm::{Collectives, Comm, Communicator},
    ddp::UNFROZEN,
    strategy::TensorAxis,
    unused::{Unused, idles, require_all, used_anywhere},
};

pub(super) struct ZeroEngine<R: Runtime> {
    pub(super) comm: Comm<R>,
    tensor: Arc<TensorAxis<R>>,
    pub(super) units: Vec<Unit<R>>,
    options: ZeroOptions,
    /// True if units are sent between passes alone. Ranks that use different parameters complete them at different
    /// times, which would come before or after units of other stages.
    pub(super) sends_between: bool,
    /// The unit of a leaf and its place in it, by the identity of the leaf.
    place: HashMap<usize, (usize, usize)>,
    /// Units of one name: parameters of a layer that differ in dtype, or in trainability. They are read together, so
    /// they are gathered, held and released together.
    sets: Vec<Vec<usize>>,
    /// The set of each unit.
    set_of: Vec<usize>,
    reads: ReadOrder,
    sends: SendOrder,
    /// True if units are sent in the order in which they became complete on rank 0.
    learned: bool,
    /// The number of open scopes that keep all gathered values.
    scopes: usize,
    /// The number of parts of a step that keep all gathered values. A failed step may have left some.
    holds: usize,
    last: bool,
    /// True if the losses of this rank weigh nothing in this step.
    pub(super) has_zero_weight: bool,
    /// True if a rank may compute nothing in a step, so that no rank can gather parameters as it reads them.
    pub(super) idles: bool,
}

impl<R: Runtime> ZeroEngine<R> {
    pub(super) fn new(
        comm: &Comm<R>,
        tensor: Arc<TensorAxis<R>>,
        units: Vec<Unit<R>>,
        options: ZeroOptions,
        of_stages: bool,
    ) -> Self {
        let leaves = |(u, unit): (usize, &Unit<R>)| {
            unit.leaves.iter().enumerate().map(move |(i, l)| (l.id(), (u, i))).collect::<Vec<_>>()
        };
        let place = units.iter().enumerate().flat_map(leaves).collect();
        let (mut sets, mut set_of): (Vec<Vec<usize>>, Vec<usize>) = (Vec::new(), Vec::new());
        for (u, unit) in units.iter().enumerate() {
            let set = sets.iter().position(|set| units[set[0]].name == unit.name).unwrap_or(sets.len());
            if set == sets.len() {
                sets.push(Vec::new());
            }
            sets[set].push(u);
            set_of.push(set);
        }
        // Gradients usually become final from the last layer to the first.
        let sends = SendOrder::new((0..units.len()).rev().filter(|&u| units[u].own.is_some()).collect());
        ZeroEngine {
            comm: comm.clone(),
            tensor,
            units,
            sends_between: of_stages && options.unused == Unused::Allow,
            options,
            place,
            sets,
            set_of,
            reads: ReadOrder::default(),
            sends,
            learned: false,
            scopes: 0,
            holds: 0,
            last: true,
            has_zero_weight: false,
            idles: false,
        }
    }

    /// The unit that has a leaf.
    pub(super) fn unit_of(&mut self, leaf: &Arc<Leaf<R>>) -> Option<&mut Unit<R>> {
        let &(unit, _) = self.place.get(&leaf.id())?;
        self.units.get_mut(unit)
    }

    fn is_root(&self, unit: usize) -> bool {
        self.units[unit].name.is_empty()
    }

    fn is_pinned(&self) -> bool {
        self.scopes + self.holds > 0
    }

    /// The value of a leaf, whose unit is gathered; none if no unit has it.
    pub(super) fn value(&mut self, leaf: &Leaf<R>) -> Option<Result<Tensor<R>>> {
        let id = std::ptr::from_ref(leaf) as usize;
        let &(unit, i) = self.place.get(&id)?;
        Some(self.acquire(unit).and_then(|()| self.units[unit].value(i)))
    }

    /// Gathers a unit that is about to be read, with the others of its name. Releases other units, and prefetches the
    /// units that will be read next. An unsharded unit only has its values fetched, which matters once after an update.
    pub(super) fn acquire(&mut self, unit: usize) -> Result<()> {
        if !self.units[unit].is_sharded() {
            return self.units[unit].fetch();
        }
        let set = self.set_of[unit];
        self.reads.note(set);
        let next = self.reads.following(set);
        if self.units[unit].is_present() {
            // The unit that the forward left: the one before it is prefetched while this one's gradients are computed.
            return if self.reads.backward && !self.is_root(unit) { self.prefetch_set(next) } else { Ok(()) };
        }
        // A forward may keep values for its backward pass.
        let keeps = self.is_pinned() || (self.options.gathered_until_backward && !self.reads.backward);
        for other in (0..self.units.len()).filter(|_| !keeps) {
            let others = self.set_of[other];
            if others != set && Some(others) != next && !self.is_root(other) {
                self.units[other].release()?;
            }
        }
        self.sets[set].iter().try_for_each(|&u| self.units[u].prefetch())?;
        self.units[unit].fetch()?;
        self.prefetch_set(next)
    }

    /// Prefetches the values of a set, unless gradients are in flight. Beside those, the unit that is read and its own
    /// gradients, the set would be a fourth unit. A forward first collects the sums of the backward pass before it,
    /// which a pipeline has not ended.
    fn prefetch_set(&mut self, next: Option<usize>) -> Result<()> {
        if !self.reads.backward {
            self.collect_all()?;
        }
        let sending = (0..self.units.len()).any(|u| !self.is_root(u) && self.units[u].is_sending());
        let Some(next) = next.filter(|_| !sending) else { return Ok(()) };
        self.sets[next].iter().try_for_each(|&u| self.units[u].prefetch())
    }

    /// Starts or collects transfers when a gradient of `unit` is about to be written. Up to the middle of a unit, the
    /// sums of the unit before are in flight; from there on, the values of the unit after.
    fn on_backward_progress(&mut self, unit: usize) -> Result<()> {
        let (stage, begun) = (self.options.stage, self.units[unit].begun.iter().filter(|&&begun| begun).count());
        let first_half = 2 * begun + 1 < self.units[unit].leaves.len();
        if first_half || !self.reads.backward || self.is_root(unit) || !stage.shards_gradients() {
            return Ok(());
        }
        self.collect_all()?;
        match stage.shards_parameters() {
            true => self.prefetch_set(self.reads.following(self.set_of[unit])),
            false => Ok(()),
        }
    }

    /// Gathers the unit of a leaf that is about to be read.
    pub(super) fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        match self.place.get(&leaf.id()) {
            Some(&(unit, _)) => self.acquire(unit),
            None => Ok(()),
        }
    }

    /// Trains units that were frozen as a whole when they were made, and no longer are, on all ranks of a step alike.
    pub(super) fn unfreeze(&mut self, optimizer: &dyn Shards<R>, place: StatePlace) -> Result<()> {
        let is_unfrozen = |unit: &Unit<R>| unit.own.is_none() && unit.leaves.iter().any(|leaf| leaf.requires_grad());
        let unfrozen: Vec<usize> = (0..self.units.len()).filter(|&u| is_unfrozen(&self.units[u])).collect();
        if unfrozen.is_empty() {
            return Ok(());
        }
        let leaves = unfrozen.iter().flat_map(|&u| &self.units[u].leaves).filter(|leaf| leaf.requires_grad());
        let names: Vec<String> = leaves.map(|leaf| leaf.name().to_string()).collect();
        self.tensor.everyone().agree(UNFROZEN, names.join(" ").as_bytes())?;
        for unit in unfrozen {
            self.units[unit].optimize(optimizer, place)?;
            self.sends.add(unit);
        }
        Ok(())
    }

    pub(super) fn begin_step(&mut self) -> Result<()> {
        self.units.iter_mut().for_each(Unit::forget);
        self.reads.begin_step();
        self.sends.end();
        (self.holds, self.has_zero_weight) = (0, false);
        // Values left gathered by an evaluation, or by a failed step, would be read unseen: the order of reads would
        // lack them.
        self.release_all()?;
        if self.options.stage.shards_parameters() {
            // Values that were put into leaves from outside are sharded before they are read.
            self.units.iter_mut().try_for_each(Unit::adopt)?;
        }
        if self.reads_differ() { self.prefetch_all() } else { Ok(()) }
    }

    /// True if ranks may read different units. No unit can then be gathered when it is read, because gathers of
    /// different units would be matched. All are gathered at once, in one order, and kept for the step.
    fn reads_differ(&self) -> bool {
        (self.idles || self.options.unused == Unused::Allow) && self.options.stage.shards_parameters()
    }

    pub(super) fn begin_sweep(&mut self, last: bool) -> Result<()> {
        self.end_sweep()?;
        self.collect_all()?;
        self.reads.begin_sweep();
        self.sends.begin_sweep();
        self.last = last;
        self.units.iter_mut().for_each(Unit::begin_sweep);
        Ok(())
    }

    /// Ends a backward pass: sends the units that it did not reach. Their number may depend on the rank; the number of
    /// units sent must not.
    pub(super) fn end_sweep(&mut self) -> Result<()> {
        self.send_rest()?;
        // Reads from this point on are those of a forward.
        self.reads.backward = false;
        // Values are not prefetched while sums are in flight.
        if self.options.stage.shards_parameters() { self.collect_all() } else { Ok(()) }
    }

    pub(super) fn slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        let Some(&(unit, i)) = self.place.get(&leaf.id()) else { return Ok(None) };
        if !self.units[unit].lends_slots() {
            return Ok(None);
        }
        self.on_backward_progress(unit)?;
        self.units[unit].slot(i).map(Some)
    }

    pub(super) fn ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        let Some(&(unit, i)) = self.place.get(&leaf.id()) else { return Ok(()) };
        let slot = match grad {
            LeafGrad::Slot(slot) => slot,
            LeafGrad::Own(own) => {
                self.on_backward_progress(unit)?;
                let mut slot = self.units[unit].slot(i)?;
                slot.accumulate(&Op::cast(own.dtype(), slot.dtype()), &[&own])?;
                slot
            }
        };
        self.units[unit].mark_ready(i, slot)?;
        self.units[unit].ready[i] = true;
        if self.units[unit].is_complete() {
            self.sends.note(unit);
        }
        // Units are sent in one order on every rank: a complete unit waits for those before it.
        while let Some(next) = self.sends.next().filter(|&next| !self.sends_between && self.units[next].is_complete()) {
            self.send(next)?;
        }
        // A pipeline does not call `end_sweep`: reads after the last unit are those of a forward.
        self.reads.backward &= self.sends.next().is_some();
        Ok(())
    }

    fn send(&mut self, unit: usize) -> Result<()> {
        self.sends.advance();
        if self.last || (self.options.stage.shards_gradients() && !self.options.reduce_once) {
            self.collect_all()?;
            self.units[unit].send()?;
        }
        if !self.is_root(unit) && !self.is_pinned() {
            self.units[unit].release()?;
        }
        Ok(())
    }

    fn send_rest(&mut self) -> Result<()> {
        while let Some(next) = self.sends.next() {
            self.send(next)?;
        }
        Ok(())
    }

    /// Waits for sums of a step that was given up, or has failed: they hold memory while they are in flight.
    pub(super) fn wait_for_abandoned(&mut self) {
        self.units.iter_mut().for_each(|unit| drop(unit.collect()));
        self.units.iter_mut().for_each(|unit| drop(unit.end_partial()));
    }

    /// Waits for the sums of all units that were sent. Where they are the step's, partial gradients go on to the tensor
    /// axis; if its ranks may use different parameters, only between passes.
    fn collect_all(&mut self) -> Result<()> {
        let overlaps = self.last && self.options.unused == Unused::Error;
        for unit in &mut self.units {
            if unit.collect()? && overlaps {
                unit.start_partial(&self.tensor)?;
            }
        }
        Ok(())
    }

    /// Ends the last backward pass. Parameters that no rank of a step used are not updated.
    pub(super) fn finish(&mut self) -> Result<()> {
        if self.options.unused == Unused::Error {
            self.require_all()?;
        }
        self.end_sweep()?;
        self.collect_all()?;
        if self.options.unused == Unused::Allow {
            self.agree_on_used()?;
            self.units.iter_mut().try_for_each(|unit| unit.start_partial(&self.tensor))?;
        }
        self.learn()?;
        self.units.iter_mut().try_for_each(Unit::end_partial)?;
        if self.reads_differ() { self.release_prefetched() } else { self.release_all() }
    }

    /// Learns the order of sends after the first step: from then on the order in which units became complete on rank 0.
    /// Until they are sent, unsharded gradients of all complete units take memory.
    fn learn(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.learned, true) || self.units.len() < 2 {
            return Ok(());
        }
        let own = if self.comm.rank() == 0 { self.sends.seen() } else { Vec::new() };
        let seen = self.comm.exchange(&own)?.swap_remove(0);
        self.sends.follow(&seen);
        self.sends.end();
        Ok(())
    }

    /// An error that names the parameters without a gradient. A rank without an example in this step contributes zeros
    /// to the gradients of other ranks.
    fn require_all(&mut self) -> Result<()> {
        if idles(self.has_zero_weight, self.units.iter().flat_map(|unit| unit.used.iter().copied())) {
            self.units.iter_mut().for_each(Unit::mark_used);
        }
        require_all(self.units.iter().flat_map(|unit| unit.leaves.iter().zip(unit.used.iter().copied())))
    }

    fn agree_on_used(&mut self) -> Result<()> {
        let own = self.units.iter().flat_map(|unit| unit.used.iter().copied());
        let anywhere = used_anywhere(self.tensor.everyone(), own)?;
        let used = self.units.iter_mut().flat_map(|u| u.used.iter_mut());
        used.zip(anywhere).for_each(|(used, anywhere)| *used = anywhere);
        Ok(())
    }

    /// An error if an update with these learning rates could not begin.
    pub(super) fn check_update(&mut self, lrs: &[f64]) -> Result<()> {
        let claimed = self.units.iter_mut().try_for_each(|unit| unit.claim(lrs));
        let shown = self.units.iter_mut().try_for_each(Unit::unclaim);
        claimed.and(shown)
    }

    /// Updates all units, or none if one cannot be updated. Only an error during the computation leaves earlier units
    /// updated.
    pub(super) fn update(&mut self, lrs: &[f64], scale: &Tensor<R>) -> Result<()> {
        let claimed = self.units.iter_mut().try_for_each(|unit| unit.claim(lrs));
        let updated = claimed.and_then(|()| self.units.iter_mut().try_for_each(|unit| unit.update(lrs, scale)));
        if updated.is_err() {
            // A value that cannot be shown is an error at its next read; the first error is the one to report.
            self.units.iter_mut().for_each(|unit| drop(unit.unclaim()));
        }
        updated
    }

    /// Prefetches all units, and keeps them until [`release_prefetched`](ZeroEngine::release_prefetched). A read waits
    /// for its unit.
    pub(super) fn prefetch_all(&mut self) -> Result<()> {
        self.holds += 1;
        self.units.iter_mut().try_for_each(Unit::prefetch)
    }

    /// Ends [`prefetch_all`](ZeroEngine::prefetch_all).
    pub(super) fn release_prefetched(&mut self) -> Result<()> {
        self.holds = self.holds.saturating_sub(1);
        self.release_all()
    }

    /// Gathers all units, and keeps them until [`release_gathered`](ZeroEngine::release_gathered).
    pub(super) fn gather_all(&mut self) -> Result<()> {
        self.scopes += 1;
        self.units.iter_mut().try_for_each(Unit::fetch)
    }

    /// Ends [`gather_all`](ZeroEngine::gather_all).
    pub(super) fn release_gathered(&mut self) -> Result<()> {
        self.scopes = self.scopes.saturating_sub(1);
        self.release_all()
    }

    fn release_all(&mut self) -> Result<()> {
        if self.is_pinned() { Ok(()) } else { self.units.iter_mut().try_for_each(Unit::release) }
    }
}
