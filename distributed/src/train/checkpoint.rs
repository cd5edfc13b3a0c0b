//! Checkpoints of training steps.

use std::collections::BTreeMap;

use autograd::{RandomState, random_state, set_random_state};
use numcore::{Error, Result, Runtime, Tensor};
use optim::{HyperParams, LossScaler};

use super::{HyperParameters, TrainStep, Updates, updates::Torn};
use crate::{
    checkpoint::{CheckpointPart, Checkpointed, Folder, Manifest, SnapshotWriter, Wanted, hyper, names},
    strategy::Strategy,
};

/// Notes of the caller in a checkpoint: the position of its data (`Loader::note`), a description.
pub type CheckpointNotes = BTreeMap<String, String>;

impl<R: Runtime> TrainStep<R> {
    /// Saves everything that resuming needs, under the number of updates so far. Every rank calls it, in the thread
    /// that trains.
    pub fn save(&self, folder: &Folder, notes: &CheckpointNotes) -> Result<()> {
        folder.save(&self.strategy.ranks().everyone, self.global_step(), self, notes)
    }

    /// A writer for [`save_in_background`](TrainStep::save_in_background). Every rank makes one, and keeps it.
    pub fn snapshot_writer(&self) -> Result<SnapshotWriter<R>> {
        SnapshotWriter::new(&self.strategy.ranks().everyone)
    }

    /// Saves as [`save`](TrainStep::save) does, while training goes on. Returns once a copy is made, which a thread
    /// writes. Every rank calls it.
    ///
    /// # Errors
    /// The errors of [`SnapshotWriter::save`].
    pub fn save_in_background(
        &self,
        writer: &mut SnapshotWriter<R>,
        folder: &Folder,
        notes: &CheckpointNotes,
    ) -> Result<()> {
        writer.save(folder, self.global_step(), self, notes)
    }

    /// Resumes from the last complete checkpoint in a folder, saved by any number of ranks with any strategy. Returns
    /// its manifest, or none if there is no checkpoint. With as many ranks as saved it, training continues as if it had
    /// never stopped, bit for bit.
    pub fn load(&mut self, folder: &Folder) -> Result<Option<Manifest>> {
        let comm = self.strategy.ranks().everyone.clone();
        folder.load_latest(&comm, self)
    }
}

impl Updates {
    /// The numbers that are saved. `share` is the number of the random stream that the rank draws from.
    pub(crate) fn numbers(&self, share: usize) -> BTreeMap<String, u64> {
        let mut numbers = BTreeMap::from([("trainer/steps".into(), self.steps)]);
        if let Some(scaler) = &self.scaler {
            numbers.insert("scaler/factor".into(), scaler.factor().to_bits());
            numbers.insert("scaler/good".into(), scaler.good_steps());
        }
        let RandomState { seed, drawn, .. } = random_state();
        numbers.insert(names::own(share, "seed"), seed);
        numbers.insert(names::own(share, "drawn"), drawn);
        numbers
    }

    /// An error if an update or a load failed while it changed weights, which then belong to no step.
    pub(crate) fn check_whole(&self) -> Result<()> {
        let Some(torn) = self.torn else { return Ok(()) };
        let what = if torn == Torn::Load { "a load" } else { "an update" };
        let why = format!(
            "after step {} {what} failed while it changed weights, so some may be new and some old: load a checkpoint",
            self.steps
        );
        Err(Error::usage("a training step", why))
    }

    /// An error if [`restore`](Updates::restore) would refuse these numbers.
    pub(crate) fn check_restore(&self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.resumed(numbers).map(|_| ())
    }

    /// The hyper-parameters to save: all that the configuration saves, and those that rules adapt in any case.
    pub(crate) fn hyper_numbers<R: Runtime>(&self, strategy: &dyn Strategy<R>) -> BTreeMap<String, u64> {
        // A strategy that does not report them was refused when the step was made, if they are to be saved.
        let groups = strategy.hyper_parameters().unwrap_or_default();
        hyper::numbers(&groups, self.config.hyper_parameters != HyperParameters::Configured)
    }

    /// An error if hyper-parameters are to be saved, and the strategy does not report them.
    pub(crate) fn check_hyper<R: Runtime>(&self, strategy: &dyn Strategy<R>) -> Result<()> {
        match self.config.hyper_parameters {
            HyperParameters::Configured => Ok(()),
            _ => strategy.hyper_parameters().map(|_| ()),
        }
    }

    /// The groups of a strategy with the hyper-parameters of a checkpoint; none unless some of these are restored.
    fn restored_groups<R: Runtime>(
        &self,
        strategy: &dyn Strategy<R>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<Option<Vec<HyperParams>>> {
        let all = self.config.hyper_parameters == HyperParameters::Restored;
        let groups = strategy.hyper_parameters().or_else(|e| if all { Err(e) } else { Ok(Vec::new()) })?;
        let restores = all || groups.iter().any(|group| !group.adapted.is_empty());
        restores.then(|| hyper::restored(numbers, groups, all)).transpose()
    }

    /// An error if [`restore_hyper`](Updates::restore_hyper) would fail.
    pub(crate) fn check_restore_hyper<R: Runtime>(
        &self,
        strategy: &mut dyn Strategy<R>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let groups = self.restored_groups(strategy, numbers)?;
        groups.map_or(Ok(()), |groups| strategy.check_hyper_parameters(&groups))
    }

    /// Takes over the hyper-parameters of a checkpoint, if the configuration restores them.
    pub(crate) fn restore_hyper<R: Runtime>(
        &self,
        strategy: &mut dyn Strategy<R>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let groups = self.restored_groups(strategy, numbers)?;
        groups.map_or(Ok(()), |groups| strategy.set_hyper_parameters(&groups))
    }

    /// The loss scaler as it continues from these numbers.
    fn resumed(&self, numbers: &BTreeMap<String, u64>) -> Result<Option<LossScaler>> {
        let mut scaler = self.scaler.clone();
        if let (Some(scaler), Some(&factor), Some(&good)) =
            (&mut scaler, numbers.get("scaler/factor"), numbers.get("scaler/good"))
        {
            scaler.resume(f64::from_bits(factor), good)?;
        }
        Ok(scaler)
    }

    pub(crate) fn restore(&mut self, numbers: &BTreeMap<String, u64>, share: usize) -> Result<()> {
        self.scaler = self.resumed(numbers)?;
        let number = |name: &str| numbers.get(name).copied();
        (self.steps, self.torn) = (number("trainer/steps").unwrap_or(0), None);
        // The stream is that of the current share. A share that the checkpoint lacks continues from the state of share
        // 0.
        let random = |share| Some((number(&names::own(share, "seed"))?, number(&names::own(share, "drawn"))?));
        if let Some((seed, drawn)) = random(share).or_else(|| random(0)) {
            set_random_state(RandomState { seed, drawn, ..random_state() });
        }
        Ok(())
    }
}

impl<R: Runtime> Checkpointed<R> for TrainStep<R> {
    fn parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.updates.check_whole()?;
        self.strategy.parts()
    }

    fn parameter_parts(&self) -> Result<Vec<CheckpointPart<R>>> {
        self.strategy.parameter_parts()
    }

    fn swap_parameter_parts(&mut self, rows: &[Tensor<R>]) -> Result<bool> {
        self.strategy.swap_parameter_parts(rows)
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        let mut numbers = self.strategy.numbers();
        numbers.extend(self.updates.numbers(self.strategy.ranks().random_stream));
        numbers.extend(self.updates.hyper_numbers(&*self.strategy));
        numbers
    }

    fn expect(&mut self, numbers: &BTreeMap<String, u64>) {
        self.strategy.expect(numbers);
    }

    fn wanted(&self) -> Result<Vec<Wanted>> {
        self.strategy.wanted()
    }

    fn check_restore(&mut self, numbers: &BTreeMap<String, u64>) -> Result<()> {
        self.strategy.check_restore(numbers)?;
        self.updates.check_restore_hyper(&mut *self.strategy, numbers)?;
        self.updates.check_restore(numbers)
    }

    fn restore(
        &mut self,
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        // Micro-batches of a step that was begun were computed with other weights.
        self.discard_pushed();
        self.updates.torn = Some(Torn::Load);
        self.strategy.restore(read, numbers)?;
        self.updates.restore_hyper(&mut *self.strategy, numbers)?;
        self.updates.restore(numbers, self.strategy.ranks().random_stream)
    }
}
