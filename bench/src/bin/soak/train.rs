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
pub type Values = BTreeMap<String, Vec<f64>>;

/// A program on this rank.
pub struct Run {
    comm: Comm<Cpu>,
    program: Program,
    trainer: Box<dyn Trains>,
}

impl Run {
    /// Before the first step; values are drawn from `seed`, and then those of rank 0.
    pub fn new(comm: &Comm<Cpu>, program: &Program, seed: u64) -> Result<Self> {
        let trainer = trainer(comm, program, seed)?;
        Ok(Run { comm: comm.clone(), program: program.clone(), trainer })
    }

    /// One step, from 0; its loss.
    pub fn step(&mut self, step: usize) -> Result<f64> {
        let Program { seed, examples, task, .. } = &self.program;
        let all: Batch = task.batch(self.comm.runtime(), seed.wrapping_mul(1000) + step as u64, *examples)?;
        self.trainer.train(&self.comm, &self.program, all)?.loss()
    }

    /// Saves a checkpoint after `steps` steps.
    pub fn save(&mut self, folder: &Folder, steps: usize) -> Result<()> {
        folder.save(&self.comm, steps as u64, self.trainer.state(), &CheckpointNotes::new())
    }

    /// Resumes from the last checkpoint.
    pub fn load(&mut self, folder: &Folder) -> Result<()> {
        folder.load_latest(&self.comm, self.trainer.state()).map(|_| ())
    }

    /// What this rank can have of the weights.
    pub fn weights(&self) -> Result<Values> {
        let _here = self.trainer.gather()?;
        let mut values = Values::new();
        for module in self.trainer.modules() {
            for (name, value) in module.state_dict()? {
                values.insert(name, value.to_vec::<f64>()?);
            }
        }
        Ok(values)
    }
}
