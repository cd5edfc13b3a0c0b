//! All units of a model: which are gathered when, and in which order gradients are reduced.

use std::{collections::HashMap, sync::Arc};

use autograd::{Leaf, LeafGrad};
use numcore::{Result, Runtime, Tensor, TensorMut, ops::Op};

use super::{ZeroOptions, unit::Unit};
use crate::{
    comm::Comm,
    unused::{Unused, require_all, used_anywhere},
};

pub(super) struct Engine<R: Runtime> {
    pub(super) comm: Comm<R>,
    pub(super) units: Vec<Unit<R>>,
    options: ZeroOptions,
    /// Unit and place of a leaf, by its identity.
    place: HashMap<usize, (usize, usize)>,
    /// Units in the order in which the last forward read them first.
    order: Vec<usize>,
    seen: Vec<usize>,
    backward: bool,
    /// How many scopes want all gathered values kept.
    pins: usize,
    /// The next unit, from the last, whose gradients are sent.
    next: usize,
    last: bool,
}

impl<R: Runtime> Engine<R> {
    pub(super) fn new(comm: &Comm<R>, units: Vec<Unit<R>>, options: ZeroOptions) -> Self {
        let leaves = |(u, unit): (usize, &Unit<R>)| {
            unit.leaves.iter().enumerate().map(move |(i, l)| (l.id(), (u, i))).collect::<Vec<_>>()
        };
        let place = units.iter().enumerate().flat_map(leaves).collect();
        Engine {
            comm: comm.clone(),
            units,
            options,
            place,
            order: Vec::new(),
            seen: Vec::new(),
            backward: false,
            pins: 0,
            next: 0,
            last: true,
        }
    }

    /// The unit a leaf is in.
    pub(super) fn unit_of(&mut self, leaf: &Arc<Leaf<R>>) -> Option<&mut Unit<R>> {
        let &(unit, _) = self.place.get(&leaf.id())?;
        self.units.get_mut(unit)
    }

    fn is_root(&self, unit: usize) -> bool {
        self.units[unit].name.is_empty()
    }

    /// A leaf's value, its unit gathered; none if it is nobody's.
    pub(super) fn value(&mut self, leaf: &Leaf<R>) -> Option<Result<Tensor<R>>> {
        let id = std::ptr::from_ref(leaf) as usize;
        let &(unit, i) = self.place.get(&id)?;
        let fetched = self.need(unit);
        let leaf = self.units[unit].leaves[i].clone();
        Some(fetched.and_then(|()| leaf.value()))
    }

    /// A unit is about to be read: gathers it, lets others go, and sends for the one that will be read next.
    pub(super) fn need(&mut self, unit: usize) -> Result<()> {
        if !self.backward && !self.seen.contains(&unit) {
            self.seen.push(unit);
        }
        let next = self.following(unit);
        if self.units[unit].is_present() {
            // The unit that the forward left: the one before it is sent for while this one's gradients are computed.
            return if self.backward && !self.is_root(unit) { self.send_for(next) } else { Ok(()) };
        }
        for other in 0..self.units.len() {
            if other != unit && Some(other) != next && !self.is_root(other) && self.pins == 0 {
                self.units[other].release()?;
            }
        }
        self.units[unit].fetch()?;
        self.send_for(next)
    }

    /// Sends for values, unless gradients are on their way: beside those, the unit that is read and its own gradients, values of
    /// another would be a fourth unit in whole.
    fn send_for(&mut self, next: Option<usize>) -> Result<()> {
        let sending = (0..self.units.len()).any(|u| !self.is_root(u) && self.units[u].is_sending());
        next.filter(|_| !sending).map_or(Ok(()), |next| self.units[next].prefetch())
    }

    /// A gradient of this unit is about to be written. Up to the middle of a unit, sums of the one before travel; from there on, the
    /// values of the one after.
    fn half_way(&mut self, unit: usize) -> Result<()> {
        let (stage, ready) = (self.options.stage, self.units[unit].ready.iter().filter(|&&ready| ready).count());
        let first_half = 2 * ready + 1 < self.units[unit].leaves.len();
        if first_half || !self.backward || self.is_root(unit) || !stage.shards_gradients() {
            return Ok(());
        }
        self.collect_all()?;
        if stage.shards_parameters() { self.send_for(self.following(unit)) } else { Ok(()) }
    }

    /// A leaf is about to be read.
    pub(super) fn needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        match self.place.get(&leaf.id()) {
            Some(&(unit, _)) => self.need(unit),
            None => Ok(()),
        }
    }

    /// The unit that was read after this one, or, in backward, before it.
    fn following(&self, unit: usize) -> Option<usize> {
        let at = self.order.iter().position(|&u| u == unit)?;
        let next = if self.backward { at.checked_sub(1) } else { Some(at + 1) };
        next.and_then(|at| self.order.get(at).copied())
    }

    pub(super) fn begin_step(&mut self) -> Result<()> {
        self.units.iter_mut().for_each(Unit::forget);
        (self.backward, self.next) = (false, 0);
        if self.reads_differ() { self.hold() } else { Ok(()) }
    }

    /// Whether ranks may read other units than each other. Then none can be gathered when it is read: gathers of different units
    /// would meet. All are gathered at once, in one order, and kept for the step.
    fn reads_differ(&self) -> bool {
        self.options.unused == Unused::Allow && self.options.stage.shards_parameters()
    }

    pub(super) fn begin_sweep(&mut self, last: bool) -> Result<()> {
        // What the sweep before did not come to: how many units that are depends on the rank, how many are sent must not.
        self.send_rest()?;
        self.collect_all()?;
        (self.backward, self.next, self.last) = (true, self.units.len(), last);
        if !self.seen.is_empty() {
            self.order = std::mem::take(&mut self.seen);
        }
        for unit in &mut self.units {
            unit.sent = false;
            for (ready, leaf) in unit.ready.iter_mut().zip(&unit.leaves) {
                *ready = !leaf.requires_grad();
            }
        }
        Ok(())
    }

    pub(super) fn slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        let Some(&(unit, i)) = self.place.get(&leaf.id()) else { return Ok(None) };
        self.half_way(unit)?;
        self.units[unit].slot(i).map(Some)
    }

    pub(super) fn ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        let Some(&(unit, i)) = self.place.get(&leaf.id()) else { return Ok(()) };
        let slot = match grad {
            LeafGrad::Slot(slot) => slot,
            LeafGrad::Own(own) => {
                self.half_way(unit)?;
                let mut slot = self.units[unit].slot(i)?;
                slot.accumulate(&Op::identity(), &[&own])?;
                slot
            }
        };
        self.units[unit].settle(i, slot)?;
        self.units[unit].ready[i] = true;
        // The units before this one are not complete yet; those that follow it are sent first, on every rank.
        while self.next > 0 && self.units[self.next - 1].ready.iter().all(|&r| r) {
            self.send(self.next - 1)?;
        }
        // What is read from here on is the forward of another micro-batch.
        self.backward &= self.next > 0;
        Ok(())
    }

    fn send(&mut self, unit: usize) -> Result<()> {
        self.next = unit;
        if self.last || self.options.stage.shards_gradients() {
            self.collect_all()?;
            self.units[unit].send()?;
        }
        if !self.is_root(unit) && self.pins == 0 {
            self.units[unit].release()?;
        }
        Ok(())
    }

    fn send_rest(&mut self) -> Result<()> {
        while self.next > 0 {
            self.send(self.next - 1)?;
        }
        Ok(())
    }

    fn collect_all(&mut self) -> Result<()> {
        self.units.iter_mut().try_for_each(Unit::collect)
    }

    /// After the last sweep.
    pub(super) fn finish(&mut self) -> Result<()> {
        if self.options.unused == Unused::Error {
            self.require_all()?;
        }
        self.send_rest()?;
        self.collect_all()?;
        if self.options.unused == Unused::Allow {
            self.agree_on_used()?;
        }
        self.backward = false;
        if self.reads_differ() { self.unpin() } else { self.release_all() }
    }

    fn require_all(&self) -> Result<()> {
        require_all(self.units.iter().flat_map(|unit| unit.leaves.iter().zip(unit.used.iter().copied())))
    }

    fn agree_on_used(&mut self) -> Result<()> {
        let own = self.units.iter().flat_map(|unit| unit.used.iter().copied());
        let anywhere = used_anywhere(&self.comm, own)?;
        let used = self.units.iter_mut().flat_map(|u| u.used.iter_mut());
        used.zip(anywhere).for_each(|(used, anywhere)| *used = anywhere);
        Ok(())
    }

    pub(super) fn update(&mut self, lrs: &[f64], scale: &Tensor<R>) -> Result<()> {
        self.units.iter_mut().try_for_each(|unit| unit.update(lrs, scale))
    }

    /// Sends for everything, to be kept until [`unpin`](Engine::unpin); it is waited for when it is read.
    pub(super) fn hold(&mut self) -> Result<()> {
        self.pins += 1;
        self.units.iter_mut().try_for_each(Unit::prefetch)
    }

    /// Gathers everything, to be kept until [`unpin`](Engine::unpin).
    pub(super) fn pin(&mut self) -> Result<()> {
        self.pins += 1;
        self.units.iter_mut().try_for_each(Unit::fetch)
    }

    pub(super) fn unpin(&mut self) -> Result<()> {
        self.pins = self.pins.saturating_sub(1);
        self.release_all()
    }

    fn release_all(&mut self) -> Result<()> {
        self.units.iter_mut().filter(|_| self.pins == 0).try_for_each(Unit::release)
    }
}
