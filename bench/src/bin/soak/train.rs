//! Runs a program's trainer, of any strategy.

use std::collections::BTreeMap;

use weftgrad::{
    distributed::{checkpoint::Folder, comm::Comm, train::CheckpointNotes},
    prelude::*,
};

use crate::{
    program::Program,
    task::Batch,
    trainers::{Trains, trainer},
};

/// Values of tensors by name.
pub(crate) type Values = BTreeMap<String, Vec<f64>>;

/// A program's training on this rank.
pub(crate) struct Run {
    comm: Comm<Cpu>,
    program: Program,
    trainer: Box<dyn Trains>,
}

impl Run {
    /// Creates the trainer before the first step. Values are drawn from `seed`, and then replaced by those of rank 0.
    pub(crate) fn new(comm: &Comm<Cpu>, program: &Program, seed: u64) -> Result<Self> {
        let trainer = trainer(comm, program, seed)?;
        Ok(Run { comm: comm.clone(), program: program.clone(), trainer })
    }

    /// Runs step `step` (from 0), and returns its loss.
    pub(crate) fn step(&mut self, step: usize) -> Result<f64> {
        let Program { seed, examples, task, .. } = &self.program;
        let all: Batch = task.batch(self.comm.runtime(), seed.wrapping_mul(1000) + step as u64, *examples)?;
        self.trainer.train(&self.program, all)?.loss()
    }

    /// Saves a checkpoint after `steps` steps.
    pub(crate) fn save(&mut self, folder: &Folder, steps: usize) -> Result<()> {
        folder.save(&self.comm, steps as u64, self.trainer.state(), &CheckpointNotes::new())
    }

    /// Resumes from the last checkpoint.
    pub(crate) fn load(&mut self, folder: &Folder) -> Result<()> {
        folder.load_latest(&self.comm, self.trainer.state()).map(|_| ())
    }

    /// The weights that this rank can read. Of a sharded weight, elements on other ranks are NaN.
    pub(crate) fn weights(&self) -> Result<Values> {
        let _here = self.trainer.gather()?;
        let mut values = Values::new();
        for module in self.trainer.modules() {
            for (name, parameter) in module.named_parameters() {
                let (here, shape) = (parameter.value()?.to_vec::<f64>()?, parameter.logical_shape());
                let whole = match parameter.placed() {
                    None => here,
                    Some(placed) => {
                        let mut whole = vec![f64::NAN; shape.numel()];
                        for run in placed.placement().runs(0..here.len()) {
                            whole[run.logical..][..run.len].copy_from_slice(&here[run.local..][..run.len]);
                        }
                        whole
                    }
                };
                values.insert(name, whole);
            }
        }
        Ok(values)
    }
}
