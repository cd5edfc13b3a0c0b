//! Checkpoints of sharded training: every rank saves its shard, and reads the elements of its shard from any earlier
//! cut.

use std::collections::BTreeMap;

use numcore::{
    Error, Result, Runtime, Tensor, TensorMut,
    ops::{Op, Spec, ViewOps},
};
use optim::MASTER;

use super::{Piece, gradients::ShardState, sharded::Sharded, unit::Unit, values::overwrite};
use crate::{
    checkpoint::{CheckpointPart, Checkpointed, Wanted, names},
    comm::Communicator,
    strategy::TensorAxis,
};

/// A function that reads wanted elements from a checkpoint.
type Read<'a, R> = &'a mut dyn FnMut(&Wanted) -> Result<Tensor<R>>;

impl<R: Runtime> Checkpointed<R> for Sharded<R> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        let mut engine = self.engine.lock();
        let mut all = Vec::new();
        for unit in &mut engine.units {
            unit.ready_values()?;
            all.extend(unit.parts(&self.tensor)?);
        }
        let mut parts = self.buffers.parts(self.groups.all.rank() == 0 && self.tensor.rank() == 0)?;
        parts.extend(self.groups.saved(all));
        Ok(parts)
    }

    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        let (mut engine, mut parts) = (self.engine.lock(), Vec::new());
        for unit in &mut engine.units {
            unit.ready_values()?;
            parts.extend(unit.parameter_parts(&self.tensor)?);
        }
        Ok(self.groups.saved(parts))
    }

    fn swap_parameter_parts(&mut self, rows: &[Tensor<R>]) -> Result<bool> {
        let mut engine = self.engine.lock();
        // A replica, of shards or along the tensor axis, has only some of the parts of its pieces.
        if self.groups.replicas.is_some() || self.tensor.is_cut() {
            return Ok(false);
        }
        let mut rows = rows.iter();
        engine.units.iter_mut().try_for_each(|unit| unit.put_values(&mut rows))?;
        Ok(true)
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        let engine = self.engine.lock();
        let mut numbers: BTreeMap<String, u64> = engine.units.iter().flat_map(Unit::updates).collect();
        numbers.insert(names::STEPS.into(), self.steps);
        numbers
    }

    // A checkpoint has the state of parameters that are trained by now. Failure to unfreeze is an error of the next
    // step.
    fn expect(&mut self, _: &BTreeMap<String, u64>) {
        let _ = self.unfreeze();
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let engine = self.engine.lock();
        Ok(self
            .buffers
            .wanted()
            .into_iter()
            .chain(engine.units.iter().flat_map(|unit| unit.wanted(&self.tensor)))
            .collect())
    }

    fn check_restore(&mut self, _: &BTreeMap<String, u64>) -> Result<()> {
        self.engine.lock().units.iter_mut().try_for_each(|unit| unit.check_sole("load"))
    }

    fn restore(&mut self, read: Read<'_, R>, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.buffers.restore(read)?;
        self.engine.lock().units.iter_mut().try_for_each(|unit| unit.restore(&self.tensor, read, numbers))?;
        self.steps = numbers.get(names::STEPS).copied().unwrap_or(0);
        Ok(())
    }
}

impl<R: Runtime> Unit<R> {
    fn parts(&self, tensor: &TensorAxis<R>) -> Result<Vec<CheckpointPart<R>>> {
        let (at, layout) = (self.own_start(), self.layout.shard_layout(self.rank())?);
        let mut parts = Vec::new();
        for (k, piece) in self.pieces.iter().enumerate() {
            let leaf = &self.leaves[piece.parameter];
            let counts = tensor.counts(leaf);
            if counts {
                parts.push(self.parameter_part(tensor, k, at + layout.range(k).offset())?);
            }
            if let Some(own) = self.own_of(piece.parameter) {
                let states = own.optimizer.state(k);
                // The state of a whole parameter is on its owner alone.
                let saved = |s: usize| counts || self.is_of_whole(states[s].0, piece.parameter);
                for (s, wanted) in self.wanted_state(tensor, own, k).into_iter().filter(|(s, _)| saved(*s)) {
                    let (name, placement, start) = (wanted.name, wanted.placement, wanted.elements.start);
                    parts.push(CheckpointPart { name, placement, start, row: own.optimizer.row(s, k)? });
                }
            }
        }
        Ok(parts)
    }

    fn parameter_parts(&self, tensor: &TensorAxis<R>) -> Result<Vec<CheckpointPart<R>>> {
        let (at, layout) = (self.own_start(), self.layout.shard_layout(self.rank())?);
        let counts = |k: &usize| tensor.counts(&self.leaves[self.pieces[*k].parameter]);
        let part = |k| self.parameter_part(tensor, k, at + layout.range(k).offset());
        (0..self.pieces.len()).filter(counts).map(part).collect()
    }

    /// The part of a checkpoint for piece `k`, which begins at `at` in the kept values.
    fn parameter_part(&self, tensor: &TensorAxis<R>, k: usize, at: usize) -> Result<CheckpointPart<R>> {
        let piece = &self.pieces[k];
        let leaf = &self.leaves[piece.parameter];
        let row = self.values.row(at, piece.elements.len())?;
        let (name, placement) = (names::parameter(&leaf.name()), tensor.placement(leaf));
        Ok(CheckpointPart { name, placement, start: piece.elements.start, row })
    }

    /// Replaces the values of this rank's pieces. Where each rank keeps all values, ranks gather the pieces of the
    /// others.
    fn put_values<'r>(&mut self, rows: &mut impl Iterator<Item = &'r Tensor<R>>) -> Result<()> {
        self.take_values()?;
        let (at, layout) = (self.own_start(), self.layout.shard_layout(self.rank())?);
        let whole = self.values.brought()?.lend_whole()?;
        // The lengths of the gap before each piece, of the piece, and of the rest after the last.
        let (mut lens, mut end) = (Vec::new(), 0);
        for (k, piece) in self.pieces.iter().enumerate() {
            let start = at + layout.range(k).offset();
            lens.extend([start - end, piece.elements.len()]);
            end = start + piece.elements.len();
        }
        lens.push(whole.shape().numel() - end);
        let mut memory = whole.split(&lens)?;
        let put = memory.iter_mut().skip(1).step_by(2).try_for_each(|piece| {
            let row = rows.next().ok_or_else(|| Error::state("parameters", "have more parts than the given values"))?;
            piece.reset();
            piece.accumulate(&Op::identity(), &[row])
        });
        self.values.brought()?.restore(TensorMut::join(memory)?)?;
        self.values.put_away()?;
        self.leaves.iter().for_each(|leaf| leaf.touch());
        put.and(if self.is_sharded() { Ok(()) } else { self.prefetch() })
    }

    /// The optimizer of parameter `i`, unless it is frozen: frozen parameters have no state in checkpoints.
    fn own_of(&self, i: usize) -> Option<&ShardState<R>> {
        self.own.as_ref().filter(|_| self.leaves[i].requires_grad())
    }

    fn updates(&self) -> Vec<(String, u64)> {
        let steps = |own: &ShardState<R>| {
            let trained = |(k, _): &(usize, &u64)| self.leaves[self.pieces[*k].parameter].requires_grad();
            let steps = own.optimizer.steps().iter().enumerate().filter(trained);
            let name = |(k, n): (usize, &u64)| (names::updates(&self.leaves[self.pieces[k].parameter].name()), *n);
            steps.map(name).collect::<Vec<_>>()
        };
        self.own.as_ref().map_or_else(Vec::new, steps)
    }

    /// Parameters with entries in checkpoints. Parameters without elements are in no shard.
    fn saved(&self) -> impl Iterator<Item = usize> {
        (0..self.leaves.len()).filter(|&i| self.leaves[i].spec().shape.numel() > 0)
    }

    /// The elements that this rank reads: unsharded parameters where it keeps them so, state by pieces.
    fn wanted(&self, tensor: &TensorAxis<R>) -> Vec<Wanted> {
        let of = |name, i: usize, dtype, elements| Wanted {
            name,
            placement: tensor.placement(&self.leaves[i]),
            dtype,
            elements,
        };
        let dtype = self.layout.full().dtype();
        let whole = |i: usize| {
            let name = names::parameter(&self.leaves[i].name());
            of(name, i, dtype, 0..self.leaves[i].spec().shape.numel())
        };
        let mut wanted: Vec<Wanted> = match self.is_sharded() {
            true => Vec::new(),
            false => self.saved().map(whole).collect(),
        };
        for (k, piece) in self.pieces.iter().enumerate() {
            let (i, elements) = (piece.parameter, piece.elements.clone());
            let name = self.leaves[i].name();
            if self.is_sharded() {
                wanted.push(of(names::parameter(&name), i, dtype, elements));
            }
            if let Some(own) = self.own_of(i) {
                wanted.extend(self.wanted_state(tensor, own, k).into_iter().map(|(_, wanted)| wanted));
            }
        }
        wanted
    }

    /// The state of piece `k` in checkpoints, with the number of each: elements as of the parameter, or a tensor of
    /// another shape.
    fn wanted_state(&self, tensor: &TensorAxis<R>, own: &ShardState<R>, k: usize) -> Vec<(usize, Wanted)> {
        let Piece { parameter, elements } = &self.pieces[k];
        let leaf = &self.leaves[*parameter];
        let wanted = |(s, (state, spec)): (usize, (&'static str, Spec))| {
            let (name, dtype) = (names::state(state, &leaf.name()), spec.dtype);
            let other_shape = !self.layout.cuts() && spec.shape != leaf.spec().shape;
            if other_shape || self.is_of_whole(state, *parameter) {
                return (s, Wanted::whole(name, spec.shape, dtype));
            }
            (s, Wanted { name, placement: tensor.placement(leaf), dtype, elements: elements.clone() })
        };
        own.optimizer
            .state(k)
            .into_iter()
            .enumerate()
            .filter(|(_, (_, spec))| spec.shape.numel() > 0)
            .map(wanted)
            .collect()
    }

    /// Tells whether a state is of a whole parameter of which ranks along tensor have pieces. Master copies are pieces.
    fn is_of_whole(&self, state: &str, parameter: usize) -> bool {
        state != MASTER && self.cut.get(parameter).is_some_and(Option::is_some)
    }

    fn restore(&mut self, tensor: &TensorAxis<R>, read: Read<'_, R>, numbers: &BTreeMap<String, u64>) -> Result<()> {
        let wanted = self.wanted(tensor);
        self.take_values()?;
        let taken = self.take_over(&wanted, read, numbers);
        let taken = taken.and(self.values.put_away());
        // The values are in the leaves again, even after an error.
        taken.and(self.values_changed())
    }

    fn take_over(&mut self, wanted: &[Wanted], read: Read<'_, R>, numbers: &BTreeMap<String, u64>) -> Result<()> {
        let mut wanted = wanted.iter();
        let mut next = || {
            wanted
                .next()
                .map_or_else(|| Err(Error::state("a checkpoint", "wants fewer tensors than are restored")), &mut *read)
        };
        if !self.is_sharded() {
            let saved: Vec<usize> = self.saved().collect();
            let values = self.values.brought()?;
            saved.into_iter().try_for_each(|i| overwrite(values, i, &next()?))?;
        }
        let (sharded, start, layout) = (self.is_sharded(), self.own_start(), self.layout.shard_layout(self.rank())?);
        for k in 0..self.pieces.len() {
            if sharded {
                overwrite(self.values.brought()?, k, &next()?)?;
            }
            let piece = &self.pieces[k];
            let leaf = &self.leaves[piece.parameter];
            let Some(own) = &mut self.own else { continue };
            if leaf.requires_grad() {
                let states = own.optimizer.state(k).into_iter().enumerate();
                let some = states.filter(|(_, (_, spec))| spec.shape.numel() > 0).map(|(s, _)| s).collect::<Vec<_>>();
                some.into_iter().try_for_each(|s| own.optimizer.set_row(s, k, &next()?))?;
                own.optimizer.steps_mut()[k] = numbers.get(&names::updates(&leaf.name())).copied().unwrap_or(0);
            } else {
                // Checkpoints have no state of a frozen parameter; its master copy follows the value.
                let at = start + layout.range(k).offset();
                own.optimizer.adopt(k, &self.values.whole()?.narrow(0, at, piece.elements.len())?)?;
            }
        }
        Ok(())
    }
}
