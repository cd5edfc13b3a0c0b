//! Checks of a checkpoint folder when a run begins.

use distributed::comm::{Collectives, Comm, Communicator, all_ok, all_ok_after};
use numcore::{Error, Result, Runtime};

use super::Checkpoints;
use crate::{BestValue, Run};

impl<R: Runtime> Checkpoints<R> {
    /// The folder's path, which identifies a save that is due in it.
    pub(super) fn save_id(&self) -> String {
        self.folder.path().display().to_string()
    }

    /// The step that the run goes on from, if its checkpoint is in this folder.
    pub(super) fn resumed_step(&self, run: &Run<'_, R, impl Sized, impl Sized>) -> Result<Option<u64>> {
        let last = self.folder.latest_of_all(run.comm())?;
        Ok(last.filter(|last| !run.state.from_scratch && Some(*last) == run.resumed()))
    }

    /// Tells whether the best checkpoint is missing in this folder and must be saved: the run goes on from that very
    /// step. The best value of another folder, or of a checkpoint that is gone, is dropped, so that the next value is
    /// the best.
    pub(super) fn is_best_missing(&mut self, run: &Run<'_, R, impl Sized, impl Sized>) -> Result<bool> {
        let Some(BestValue { step: best, .. }) = self.best_value else { return Ok(false) };
        let own = if run.comm().rank() == 0 { self.folder.steps() } else { Ok(Vec::new()) };
        let here = all_ok(run.comm(), "Checkpoints", own)?.contains(&best);
        // Ranks may see a folder at different times: rank 0 decides.
        let is_missing = run.comm().exchange_equal([u8::from(!here)])?[0] == [1];
        let is_to_save = is_missing && run.resumed() == Some(best);
        if is_missing && !is_to_save {
            self.best_value = None;
        }
        Ok(is_to_save)
    }

    /// Checks that the folder of a run that starts from scratch is empty. Otherwise the run would go back to weights of
    /// another run, and count its checkpoints among the ones that stay.
    pub(super) fn check_folder(&self, comm: &Comm<R>) -> Result<()> {
        if self.overwrite {
            return all_ok_after(comm, "Checkpoints", || if comm.rank() == 0 { self.folder.clear() } else { Ok(()) });
        }
        let Some(last) = self.folder.latest_of_all(comm)? else { return Ok(()) };
        let why = format!(
            "{} has checkpoints of another run, the last of step {last}: go on from it with `Resume::IfThere`, or save in another folder",
            self.folder.path().display()
        );
        Err(Error::config("Checkpoints", "folder", why))
    }
}
