//! Checkpoints of several strategies. Entries have the names of the unstaged model, so any other cut, number of
//! replicas or strategy resumes from them.

use std::collections::{BTreeMap, HashMap};

use numcore::{Result, Runtime, Tensor};
use optim::HyperParams;

use super::{Strategy, StrategySet};
use crate::checkpoint::{CheckpointPart, Checkpointed, Wanted, names};

impl<R: Runtime> StrategySet<R> {
    /// The checkpoint parts of all strategies, each once: a tied parameter is saved by its first stage alone.
    fn parts_by(
        &self,
        of: impl Fn(&dyn Strategy<R>) -> Result<Vec<CheckpointPart<R>>>,
    ) -> Result<Vec<CheckpointPart<R>>> {
        let mut parts = Vec::new();
        for (k, part) in self.parts.iter().enumerate() {
            let own = of(&*part.strategy)?;
            let copies = Copies::of(self, k);
            parts.extend(own.into_iter().filter(|own| part.saves && !copies.has(&own.name)));
        }
        Ok(parts)
    }

    /// The copies of tied parameters in later stages of this rank, by their ids: the parameters' names in checkpoints.
    pub(crate) fn copies(&self) -> HashMap<usize, String> {
        let later =
            self.ties().iter().flat_map(|tied| tied.copies.iter().map(move |(stage, leaf)| (tied, stage, leaf)));
        let later = later.filter(|(tied, stage, _)| tied.first != **stage);
        later.map(|(tied, _, leaf)| (leaf.id(), tied.name.clone())).collect()
    }

    /// A group of a part's hyper-parameters, in which each copy is renamed to its tied parameter.
    pub(super) fn under_own_names(&self, part: usize, mut group: HyperParams) -> HyperParams {
        let copies = Copies::of(self, part);
        for name in &mut group.parameters {
            if let Some(copy) = copies.0.iter().find(|copy| copy.called == *name) {
                *name = copy.name.clone();
            }
        }
        group
    }
}

impl<R: Runtime> Checkpointed<R> for StrategySet<R> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.parts_by(|part| part.parts())
    }

    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.parts_by(|part| part.parameter_parts())
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        let mut numbers = BTreeMap::new();
        for (k, part) in self.parts().enumerate() {
            let copies = Copies::of(self, k);
            numbers.extend(part.numbers().into_iter().filter(|(name, _)| !copies.has(name)));
        }
        numbers
    }

    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        self.parts_mut().for_each(|part| part.expect(numbers));
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let mut wanted = Vec::new();
        for (k, part) in self.parts().enumerate() {
            let copies = Copies::of(self, k);
            wanted.extend(part.wanted()?.into_iter().map(|wanted| copies.resolved(wanted)));
        }
        Ok(wanted)
    }

    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.check_restore(numbers))
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let copies: Vec<Copies> = (0..self.parts.len()).map(|k| Copies::of(self, k)).collect();
        copies.iter().zip(self.parts_mut()).try_for_each(|(copies, part)| {
            let own = copies.with_numbers(numbers);
            part.restore(&mut |wanted| read(&copies.resolved(wanted.clone())), &own)
        })
    }
}

/// The copies of tied parameters in a part whose first copy is in an earlier stage.
struct Copies(Vec<NamedCopy>);

struct NamedCopy {
    /// The name of the copy.
    called: String,
    /// The name of the parameter.
    name: String,
}

impl Copies {
    fn of<R: Runtime>(set: &StrategySet<R>, part: usize) -> Self {
        let stage = set.stage(part);
        let copies = set.ties().iter().filter(|tied| tied.first != stage).flat_map(|tied| {
            let here = tied.copies.iter().filter(move |(at, _)| *at == stage);
            here.map(|(_, leaf)| NamedCopy { called: leaf.name().to_string(), name: tied.name.clone() })
        });
        Copies(copies.collect())
    }

    fn copy<'a>(&'a self, name: &'a str) -> Option<(&'a NamedCopy, &'a str)> {
        let (kind, leaf) = names::parted(name)?;
        self.0.iter().find(|copy| copy.called == leaf).map(|copy| (copy, kind))
    }

    /// Tells whether a checkpoint entry of this name belongs to a copy.
    fn has(&self, name: &str) -> bool {
        self.copy(name).is_some()
    }

    /// The numbers of a checkpoint, to which those of each parameter are added under the names of its copies.
    fn with_numbers(&self, numbers: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let mut all = numbers.clone();
        for (name, &number) in numbers {
            let Some((kind, parameter)) = names::parted(name) else { continue };
            let copies = self.0.iter().filter(|copy| copy.name == parameter);
            all.extend(copies.map(|copy| (format!("{kind}{}", copy.called), number)));
        }
        all
    }

    /// Redirects a read of a copy's entry to the entry of its parameter.
    fn resolved(&self, wanted: Wanted) -> Wanted {
        match self.copy(&wanted.name) {
            Some((copy, kind)) => Wanted { name: format!("{kind}{}", copy.name), ..wanted },
            None => wanted,
        }
    }
}
