//! What is written of a run's checkpoint, and what stays of those before.

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

/// How long rank 0 waits for the other ranks of a world that has failed.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// What is written, and what stays.
#[derive(Clone, Debug)]
pub(super) struct WriteJob {
    pub folder: Folder,
    pub snapshot: Arc<RunSnapshot>,
    /// How many of the last checkpoints stay, if not all, and which others.
    pub keep: Option<(usize, Vec<u64>)>,
    /// A name for a step.
    pub mark: Option<(&'static str, u64)>,
}

impl WriteJob {
    pub fn run<R: Runtime>(&self, comm: &Comm<R>) -> Result<()> {
        let RunSnapshot { step, state, notes } = &*self.snapshot;
        self.folder.save_snapshot(comm, *step, state, notes)?;
        // What fails on rank 0 alone fails on all, which must know the same of what is in place.
        all_ok_after(comm, "Checkpoints", || if comm.rank() == 0 { self.tidy() } else { Ok(()) })
    }

    /// Gives the best one its mark, and removes what does not stay.
    fn tidy(&self) -> Result<()> {
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
