//! What the tests of checkpoints share: a folder, and every way to train.

use std::fs;

use distributed::zero::FullParameters;

use crate::{data_parallel::small, prelude::*};

/// A folder that is removed when the test ends.
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// A folder that no other call gets: tests run side by side, and two may ask with one name.
    pub fn new(name: &str) -> Self {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("weftgrad-{name}-{}-{call}", crate::job::id()));
        let _ = fs::remove_dir_all(&path);
        crate::job::meet();
        Scratch(path)
    }

    pub fn folder(&self) -> Folder {
        Folder::new(&self.0)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            crate::job::meet();
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Parts of a training state that may be in shards.
pub const STAGES: [ZeroStage; 4] = [ZeroStage::None, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

/// A step of any strategy, with what tests of checkpoints do.
pub struct Any(pub TrainStep<Cpu>);

impl Any {
    pub fn new<M: Task>(comm: &Comm<Cpu>, model: &M, how: ZeroStage, config: TrainingConfig) -> Result<Self> {
        Self::over(comm, model, how, config)
    }

    pub fn over(comm: &Comm<Cpu>, model: &impl Module<Cpu>, how: ZeroStage, config: TrainingConfig) -> Result<Self> {
        Self::unused(comm, model, how, config, Unused::default())
    }

    pub fn unused(
        comm: &Comm<Cpu>,
        model: &impl Module<Cpu>,
        how: ZeroStage,
        config: TrainingConfig,
        unused: Unused,
    ) -> Result<Self> {
        Ok(Any(match how {
            ZeroStage::None => bucketed(comm, model, config, BucketOptions { unused, ..small() })?,
            stage => {
                let options = ZeroOptions { stage, units: UnitOf::children(), unused, ..Default::default() };
                sharded(comm, model, config, options)?
            }
        }))
    }

    pub fn step<M: Task>(&mut self, model: &M, comm: &Comm<Cpu>, step: usize) -> Result<TrainingMetrics<Cpu>> {
        self.step_with(|_| model.loss(comm.runtime(), step, &own(comm)))
    }

    pub fn step_with(&mut self, loss: impl FnMut(usize) -> Result<Loss<Cpu>>) -> Result<TrainingMetrics<Cpu>> {
        self.0.step(loss)
    }

    pub fn idle(&mut self) -> Result<TrainingMetrics<Cpu>> {
        self.0.idle()
    }

    /// Until all ranks are done; `see` is told every loss.
    pub fn run<B>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        loss: impl FnMut(&B) -> Result<Loss<Cpu>>,
        mut see: impl FnMut(f64),
    ) -> Result<()> {
        let see = |metrics: TrainingMetrics<Cpu>| metrics.loss().map(&mut see);
        self.0.run(batches, loss, see)
    }

    pub fn save(&self, folder: &Folder) -> Result<()> {
        self.save_with(folder, CheckpointNotes::from([("made by".into(), "a test".into())]))
    }

    pub fn save_with(&self, folder: &Folder, notes: CheckpointNotes) -> Result<()> {
        self.0.save(folder, &notes)
    }

    pub fn load(&mut self, folder: &Folder) -> Result<Option<distributed::checkpoint::Manifest>> {
        self.0.load(folder)
    }

    /// While it lives, all parameters are here.
    pub fn full(&self) -> Result<FullParameters> {
        self.0.gather_full_params()
    }

    pub fn weights(&self, model: &impl Module<Cpu>) -> Result<Vec<f64>> {
        let _scope = self.full()?;
        weights(model)
    }
}

/// Trains from step `from` to `to`; loads before if `from` is not 0, saves at the end if `save`.
pub fn run<M: Task>(
    comm: &Comm<Cpu>,
    how: ZeroStage,
    dtype: DType,
    folder: &Folder,
    from: usize,
    to: usize,
    save: bool,
) -> Result<Vec<f64>> {
    let seed = if from == 0 { 0 } else { 77 };
    let model = M::new(&Init::new(comm.runtime(), seed).dtype(dtype))?;
    let mut trainer = Any::new(comm, &model, how, config())?;
    if from > 0 {
        let manifest = trainer.load(folder)?.expect("a checkpoint");
        assert_eq!(manifest.notes()["made by"], "a test");
    }
    let mut trace = Vec::new();
    for step in from..to {
        let metrics = trainer.step(&model, comm, step)?;
        assert_eq!(metrics.global_step(), step as u64 + 1);
        trace.push(metrics.loss()?);
    }
    if save {
        trainer.save(folder)?;
    }
    trace.extend(trainer.weights(&model)?);
    Ok(trace)
}
