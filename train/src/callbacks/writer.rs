//! Writing of a run's checkpoint, and removal of earlier ones.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use distributed::{
    checkpoint::Folder,
    comm::{Collectives, Comm, Communicator, all_ok_after},
};
use numcore::{Result, Runtime};

use crate::callback::RunSnapshot;

/// The time that rank 0 waits for the other ranks of a world that has failed.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// A checkpoint to write, and the checkpoints that stay.
#[derive(Clone, Debug)]
pub(super) struct WriteJob {
    pub folder: Folder,
    pub snapshot: Arc<RunSnapshot>,
    /// The number of last checkpoints that stay, and further steps that stay; none to keep all.
    pub keep: Option<(usize, Vec<u64>)>,
    /// A name for a step.
    pub mark: Option<(&'static str, u64)>,
}

impl WriteJob {
    pub(super) fn run<R: Runtime>(&self, comm: &Comm<R>) -> Result<()> {
        let RunSnapshot { step, state, notes } = &*self.snapshot;
        self.folder.save_snapshot(comm, *step, state, notes)?;
        // A failure on rank 0 alone is one on all ranks, which must have equal results of a save.
        all_ok_after(comm, "Checkpoints", || if comm.rank() == 0 { self.prune() } else { Ok(()) })
    }

    /// Marks the best checkpoint, and removes the ones that do not stay.
    fn prune(&self) -> Result<()> {
        if let Some((name, step)) = self.mark {
            self.folder.mark(name, step)?;
        }
        self.keep.as_ref().map_or(Ok(()), |(keep, also)| self.folder.prune_except(*keep, also))
    }
}

/// A name that the ranks of this run share, and no other run has.
pub(super) fn name_of_run<R: Runtime>(comm: &Comm<R>) -> Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let own = format!("{now:x}-{:x}", std::process::id());
    let first = comm.exchange(own.as_bytes())?.swap_remove(0);
    Ok(String::from_utf8_lossy(&first).into_owned())
}
