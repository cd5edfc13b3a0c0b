//! Checkpoints of pipelines: under the names of the whole model, so that any other cut, number of replicas or strategy goes on from them.

use std::collections::BTreeMap;

use numcore::{Result, Runtime, Tensor};

use super::{PipelineTrainStep, local_stages::LocalStages};
use crate::{
    checkpoint::{CheckpointPart, Checkpointed, Folder, Manifest, SnapshotWriter, Wanted, names},
    train::{CheckpointNotes, StageStrategy},
};

impl<R: Runtime, S: StageStrategy<R>> PipelineTrainStep<R, S> {
    /// Saves everything that going on needs, under the number of updates so far. Every rank calls it, in the thread that trains.
    pub fn save(&self, folder: &Folder, notes: &CheckpointNotes) -> Result<()> {
        folder.save(&self.groups.world, self.global_step(), self, notes)
    }

    /// A writer for [`save_in_background`](PipelineTrainStep::save_in_background); every rank makes one, and keeps it.
    pub fn snapshot_writer(&self) -> Result<SnapshotWriter<R>> {
        SnapshotWriter::new(&self.groups.world)
    }

    /// Saves as [`save`](PipelineTrainStep::save) does, while training goes on: returns when a copy is made, which a thread writes. Every rank calls it.
    ///
    /// # Errors
    /// Those of [`SnapshotWriter::save`].
    pub fn save_in_background(
        &self,
        writer: &mut SnapshotWriter<R>,
        folder: &Folder,
        notes: &CheckpointNotes,
    ) -> Result<()> {
        writer.save(folder, self.global_step(), self, notes)
    }

    /// Goes on from the last complete checkpoint in a folder, whatever trainer saved it: of any strategy, on any number of ranks, of
    /// the model in any stages or whole. Gives its manifest, or none if there is none. With ranks and stages as they were, what follows
    /// is what would have followed, bit for bit.
    pub fn load(&mut self, folder: &Folder) -> Result<Option<Manifest>> {
        let world = self.groups.world.clone();
        folder.load_latest(&world, self)
    }
}

impl<R: Runtime, S: StageStrategy<R>> Checkpointed<R> for PipelineTrainStep<R, S> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        let mut parts = Vec::new();
        for (&stage, strategy) in &self.stages.parts {
            let aliases = Aliases::new(&self.stages, stage);
            parts.extend(strategy.parts()?.into_iter().filter(|part| !aliases.is_copy(&part.name)));
        }
        self.updates.check_whole()?;
        Ok(parts)
    }

    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        let mut parts = Vec::new();
        for (&stage, strategy) in &self.stages.parts {
            let aliases = Aliases::new(&self.stages, stage);
            parts.extend(strategy.parameter_parts()?.into_iter().filter(|part| !aliases.is_copy(&part.name)));
        }
        Ok(parts)
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        let mut numbers = self.updates.numbers(self.groups.draws_as);
        for (&stage, strategy) in &self.stages.parts {
            let aliases = Aliases::new(&self.stages, stage);
            let own = strategy.numbers().into_iter().chain(self.updates.hyper_numbers(strategy));
            numbers.extend(own.filter(|(name, _)| !aliases.is_copy(name)));
        }
        numbers
    }

    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        self.stages.parts.values_mut().for_each(|part| part.expect(numbers));
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        let mut wanted = Vec::new();
        for (&stage, strategy) in &self.stages.parts {
            let aliases = Aliases::new(&self.stages, stage);
            wanted.extend(strategy.wanted()?.into_iter().map(|wanted| aliases.resolved(wanted)));
        }
        Ok(wanted)
    }

    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.stages.parts.values_mut().try_for_each(|strategy| strategy.check_restore(numbers))?;
        let of_copies = self.with_copies(numbers);
        self.updates.check_restore_hyper(&mut self.stages, &of_copies)?;
        self.updates.check_restore(numbers)
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let aliases: Vec<Aliases> = self.stages.parts.keys().map(|&stage| Aliases::new(&self.stages, stage)).collect();
        for (aliases, strategy) in aliases.iter().zip(self.stages.parts.values_mut()) {
            let of_stage = aliases.with_copies(numbers);
            strategy.restore(&mut |wanted| read(&aliases.resolved(wanted.clone())), &of_stage)?;
        }
        let of_copies = self.with_copies(numbers);
        self.updates.restore_hyper(&mut self.stages, &of_copies)?;
        self.updates.restore(numbers, self.groups.draws_as)
    }
}

impl<R: Runtime, S: StageStrategy<R>> PipelineTrainStep<R, S> {
    /// The numbers of a checkpoint, and what they are for the copies of tied parameters that this rank's stages have.
    fn with_copies(&self, numbers: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let all = self.stages.parts.keys().flat_map(|&stage| Aliases::new(&self.stages, stage).0);
        Aliases(all.collect()).with_copies(numbers)
    }
}

/// The tied parameters of a stage that are copies of another stage's.
struct Aliases(Vec<Alias>);

struct Alias {
    /// What the copy is called.
    copy: String,
    /// What the parameter is called.
    name: String,
}

impl Aliases {
    fn new<R: Runtime, S>(stages: &LocalStages<R, S>, stage: usize) -> Self {
        let copies = stages.ties.iter().filter(|tied| tied.first != stage).flat_map(|tied| {
            let here = tied.copies.iter().filter(|(at, _)| *at == stage);
            here.map(|(_, leaf)| Alias { copy: leaf.name().to_string(), name: tied.name.clone() })
        });
        Aliases(copies.collect())
    }

    fn alias<'a>(&'a self, name: &'a str) -> Option<(&'a Alias, &'a str)> {
        let (kind, leaf) = names::parted(name)?;
        self.0.iter().find(|alias| alias.copy == leaf).map(|alias| (alias, kind))
    }

    /// Whether this is what belongs to a copy: the parameter's own stage has it.
    fn is_copy(&self, name: &str) -> bool {
        self.alias(name).is_some()
    }

    /// Numbers of a checkpoint, and what they are for copies.
    fn with_copies(&self, numbers: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let mut all = numbers.clone();
        for (name, &number) in numbers {
            let Some((kind, parameter)) = names::parted(name) else { continue };
            let copies = self.0.iter().filter(|alias| alias.name == parameter);
            all.extend(copies.map(|alias| (format!("{kind}{}", alias.copy), number)));
        }
        all
    }

    /// What belongs to a copy is read from the parameter's own.
    fn resolved(&self, wanted: Wanted) -> Wanted {
        match self.alias(&wanted.name) {
            Some((alias, kind)) => Wanted { name: format!("{kind}{}", alias.name), ..wanted },
            None => wanted,
        }
    }
}
