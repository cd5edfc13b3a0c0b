//! Checkpoints of data parallelism: every rank has the unsharded state, and saves a share of it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use autograd::Leaf;
use numcore::{Error, Result, Runtime, Shape, Tensor, ops::ViewOps, placement::TensorPlacement};
use optim::{FlatParams, MASTER};

use super::DataParallel;
use crate::{
    checkpoint::{CheckpointPart, Checkpointed, Wanted, names, share_out},
    comm::Communicator,
};

/// An entry of an optimizer's state dict: a state tensor or update count of a parameter, the number of steps, or a
/// setting.
enum StateDictEntry<'a> {
    State {
        state: &'a str,
        parameter: &'a str,
    },
    Updates {
        parameter: &'a str,
    },
    Steps,
    /// A hyper-parameter, which the program sets and tensors of checkpoints leave out.
    Setting,
}

/// Parses a name of an optimizer's state dict. Combined optimizers prefix names by their number. A parameter belongs to
/// one optimizer, so the prefix is dropped: checkpoints do not depend on how optimizers are combined.
fn entry(name: &str) -> StateDictEntry<'_> {
    match name.split_once('.') {
        Some((number, rest)) if number.bytes().all(|b| b.is_ascii_digit()) => entry(rest),
        Some(("step", parameter)) => StateDictEntry::Updates { parameter },
        Some(("group", _)) => StateDictEntry::Setting,
        Some((state, parameter)) => StateDictEntry::State { state, parameter },
        None => StateDictEntry::Steps,
    }
}

impl<R: Runtime> DataParallel<R> {
    /// The parameters in checkpoints: all but those without elements, which would be in no part of a sharded
    /// checkpoint.
    fn saved(&self) -> impl Iterator<Item = &Arc<Leaf<R>>> {
        self.leaves.iter().filter(|l| l.spec().shape.numel() > 0)
    }

    /// The parameters that ranks of the same pieces save together.
    fn parameters(&self) -> Result<Vec<CheckpointPart<R>>> {
        let part = |leaf: &Arc<Leaf<R>>| {
            CheckpointPart::piece(names::parameter(&leaf.name()), self.tensor.placement(leaf), &leaf.value()?)
        };
        self.saved().filter(|leaf| self.tensor.counts(leaf)).map(part).collect()
    }

    fn by_name(&self) -> HashMap<Arc<str>, &Arc<Leaf<R>>> {
        self.leaves.iter().map(|leaf| (leaf.name(), leaf)).collect()
    }

    /// The placement of an optimizer state: its parameter's if the shapes are equal, otherwise unsharded. That of a
    /// whole parameter is on the rank that updates it; the others have no entry of it.
    fn placement_of_state(&self, state: &str, leaf: Option<&Arc<Leaf<R>>>, shape: Shape) -> TensorPlacement {
        match leaf.filter(|leaf| leaf.spec().shape == shape && !self.is_of_whole(state, Some(*leaf))) {
            Some(leaf) => self.tensor.placement(leaf),
            None => TensorPlacement::whole(shape),
        }
    }

    /// Tells whether a state is of a whole parameter of which ranks have pieces. Master copies are pieces.
    fn is_of_whole(&self, state: &str, leaf: Option<&Arc<Leaf<R>>>) -> bool {
        state != MASTER && leaf.is_some_and(|leaf| self.whole.contains(&leaf.id()))
    }

    /// The placement of an optimizer state if this rank saves it, else none.
    fn saved_state(&self, state: &str, leaf: Option<&Arc<Leaf<R>>>, shape: Shape) -> Option<TensorPlacement> {
        let placement = self.placement_of_state(state, leaf, shape);
        let counts = leaf.is_none_or(|leaf| self.tensor.counts(leaf));
        let first = if placement.is_whole() { self.tensor.rank() == 0 } else { counts };
        (first || self.is_of_whole(state, leaf)).then_some(placement)
    }

    /// The names of parameters whose optimizer state is not in checkpoints. They are frozen parameters, for which
    /// optimizers may or may not keep state, and parameters without elements, which checkpoints leave out altogether.
    pub(super) fn without_state(&self) -> BTreeSet<String> {
        let without = |l: &&Arc<Leaf<R>>| !l.requires_grad() || l.spec().shape.numel() == 0;
        self.leaves.iter().filter(without).map(|l| l.name().to_string()).collect()
    }
}

impl<R: Runtime> Checkpointed<R> for DataParallel<R> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        let mut all = self.parameters()?;
        let leaves = self.by_name();
        let without = self.without_state();
        for (name, value) in self.optimizer.state_dict()? {
            if let StateDictEntry::State { state, parameter } = entry(&name)
                && !without.contains(parameter)
                && let Some(placement) = self.saved_state(state, leaves.get(parameter).copied(), *value.shape())
            {
                all.push(CheckpointPart::piece(names::state(state, parameter), placement, &value)?);
            }
        }
        let (ranks, rank) = (self.comm().size(), self.comm().rank());
        let mut parts = self.buffers.parts(rank == 0 && self.tensor.rank() == 0)?;
        parts.extend(self.reducer.parts(&self.leaves)?);
        parts.extend(share_out(all, rank, ranks));
        Ok(parts)
    }

    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        Ok(share_out(self.parameters()?, self.comm().rank(), self.comm().size()))
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        let (mut numbers, without) = (BTreeMap::new(), self.without_state());
        // An unreadable state is reported by `parts`.
        for (name, value) in self.optimizer.state_dict().unwrap_or_default() {
            if let StateDictEntry::Updates { parameter } = entry(&name)
                && !without.contains(parameter)
            {
                numbers.insert(names::updates(parameter), value.item().unwrap_or(0.0) as u64);
            }
        }
        numbers.insert(names::STEPS.into(), self.optimizer.steps());
        numbers.extend(self.reducer.numbers());
        numbers
    }

    // A checkpoint has state of the parameters trained at its save, so parameters unfrozen since then join the
    // optimizer first. An error of that is returned by the next step.
    fn expect(&mut self, _: &BTreeMap<String, u64>) {
        let _ = self.unfreeze();
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let mut wanted = self.buffers.wanted();
        let parameter =
            |l: &Arc<Leaf<R>>| Wanted::piece(names::parameter(&l.name()), self.tensor.placement(l), l.spec().dtype);
        wanted.extend(self.saved().map(parameter));
        let (without, leaves) = (self.without_state(), self.by_name());
        for (name, value) in self.optimizer.state_dict()? {
            if let StateDictEntry::State { state, parameter } = entry(&name)
                && !without.contains(parameter)
            {
                let placement = self.placement_of_state(state, leaves.get(parameter).copied(), *value.shape());
                wanted.push(Wanted::piece(names::state(state, parameter), placement, value.dtype()));
            }
        }
        wanted.extend(self.reducer.wanted(&self.leaves)?);
        Ok(wanted)
    }

    fn check_restore(&mut self, _: &BTreeMap<String, u64>) -> Result<()> {
        self.optimizer.check_sole()
    }

    /// Nothing is changed before all values were read and the optimizer has accepted its state dict.
    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let mut values: BTreeMap<String, Tensor<R>> = BTreeMap::new();
        for wanted in self.wanted()? {
            values.insert(wanted.name.clone(), read(&wanted)?.reshape(wanted.placement.local())?);
        }
        let mut take = |name: String| values.remove(&name).ok_or_else(|| Error::state(name, "was not read"));
        let mut state = self.state_from(&mut take, numbers)?;
        let parameters = self.saved().map(|leaf| Ok((leaf.clone(), take(names::parameter(&leaf.name()))?)));
        let parameters = parameters.collect::<Result<Vec<_>>>()?;
        self.optimizer.check_state_dict(&state)?;
        self.optimizer.check_sole()?;
        self.reducer.restore(&self.leaves, read, numbers)?;
        self.buffers.restore(&mut |wanted| take(wanted.name.clone()))?;
        parameters.into_iter().try_for_each(|(leaf, value)| leaf.set(value))?;
        self.follow(&mut state)?;
        self.optimizer.load_state_dict(&state)
    }
}

impl<R: Runtime> DataParallel<R> {
    /// The state dict for the optimizer: values from `take` and `numbers`, and its own entries that checkpoints lack.
    fn state_from(
        &self,
        take: &mut dyn FnMut(String) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<Vec<(String, Tensor<R>)>> {
        let number = |name: &str| numbers.get(name).copied().unwrap_or(0) as i64;
        let (rt, without, mut state) = (self.comm().runtime(), self.without_state(), Vec::new());
        for (name, old) in self.optimizer.state_dict()? {
            let value = match entry(&name) {
                // A copy: the optimizer cannot write memory that has another holder.
                StateDictEntry::State { parameter, .. } if without.contains(parameter) => old.copy()?,
                StateDictEntry::State { state, parameter } => take(names::state(state, parameter))?,
                StateDictEntry::Updates { parameter } if without.contains(parameter) => old,
                StateDictEntry::Updates { parameter } => {
                    Tensor::from_slice(rt, [], &[number(&names::updates(parameter))])?
                }
                StateDictEntry::Steps => Tensor::from_slice(rt, [], &[number(names::STEPS)])?,
                StateDictEntry::Setting => old,
            };
            state.push((name, value));
        }
        Ok(state)
    }

    /// Replaces states that checkpoints lack, in `state`, by the optimizer's own after it has adopted the restored
    /// parameter values: master copies follow those.
    fn follow(&mut self, state: &mut [(String, Tensor<R>)]) -> Result<()> {
        let without = self.without_state();
        self.optimizer.params_mut().into_iter().try_for_each(FlatParams::adopt)?;
        for ((name, value), (_, own)) in state.iter_mut().zip(self.optimizer.state_dict()?) {
            if let StateDictEntry::State { parameter, .. } = entry(name)
                && without.contains(parameter)
            {
                *value = own.copy()?;
            }
        }
        Ok(())
    }
}
