//! The weights of the best checkpoint, for the model of a run that is over.

use distributed::{
    checkpoint::{CheckpointReader, Folder},
    comm::all_ok_after,
};
use nn::{Module, ModuleExt};
use numcore::{Error, Result, Runtime};

use super::weight_averaging;
use crate::Run;

/// Returns an error where the training step owns the model, as a pipeline owns its stages: nothing could be restored.
pub(super) fn check<R: Runtime, M: Module<R>, B>(run: &Run<'_, R, M, B>) -> Result<()> {
    if !run.model().parameters().is_empty() {
        return Ok(());
    }
    let why = "the model of this run has no parameters, as its training step has them: load the checkpoint that is marked `best` when the run is over";
    Err(Error::config("Checkpoints", "restore_best", why))
}

/// Loads the evaluated values of a step into the model: its weights, or the averages of them.
pub(super) fn put<R: Runtime, M: Module<R>, B>(folder: &Folder, best: u64, run: &Run<'_, R, M, B>) -> Result<()> {
    let comm = run.comm();
    all_ok_after(comm, "Checkpoints", || {
        folder.await_step(best, comm.timeout().saturating_mul(2))?;
        let mut reader = CheckpointReader::open(folder.step(best))?;
        let averages = weight_averaging::were_evaluated(reader.manifest().numbers());
        if !averages {
            return reader.load_parameters(run.model(), |name| Some(name.into()));
        }
        reader.load_tensors(run.model(), |name| Some(weight_averaging::in_checkpoint(name)))
    })
}
