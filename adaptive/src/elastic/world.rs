//! The world of an elastic run, as one of its ranks sees it.

use std::{any::Any, time::Duration};

use numcore::{Error, ErrorKind, Result, Runtime};

use super::{
    restore::{Restored, restore},
    store::{CommitId, Placing, Store},
};
use crate::local_updates::lost_at_resize;
use distributed::{
    checkpoint::{Checkpointed, Folder, Snapshot},
    comm::{Collectives, Comm, Communicator, Membership, Rendezvous},
    train::CheckpointNotes,
};

/// The time to wait for the pieces of other ranks.
const PATIENCE: Duration = Duration::from_secs(10);
const COMMIT: &str = "ElasticWorld::commit";
/// The message of the error by which a commit makes all ranks meet again.
const CHANGES: &str = "other ranks wait to join, so a new world is formed: hand this error on to `Elastic::run`";

/// The current ranks, and the commits that this rank holds. [`Elastic::run`](super::Elastic::run) passes it to the
/// program.
pub struct ElasticWorld<R: Runtime> {
    pub(super) rendezvous: Box<dyn Rendezvous<R>>,
    pub(super) placing: Placing,
    store: Store,
    /// The folder for this rank's pieces if the run cannot go on.
    orphaned: Option<Folder>,
    /// A value that lives as long as the run.
    kept: Option<Box<dyn Any + Send>>,
    now: Option<Membership<R>>,
    /// The number of commits of this generation; none before `restore`.
    commits: Option<u64>,
    is_changing: bool,
    restored: Option<(u64, u64)>,
}

impl<R: Runtime> ElasticWorld<R> {
    pub(super) fn new(rendezvous: Box<dyn Rendezvous<R>>) -> Self {
        let (store, placing) = (Store::default(), Placing::default());
        let (now, commits, restored) = (None, None, None);
        ElasticWorld {
            rendezvous,
            placing,
            store,
            orphaned: None,
            kept: None,
            now,
            commits,
            is_changing: false,
            restored,
        }
    }

    /// Waits for the next world, and returns its communicator.
    pub(super) fn next(&mut self) -> Result<Comm<R>> {
        let membership = self.rendezvous.next_world()?;
        let comm = membership.comm.clone();
        (self.now, self.commits, self.is_changing, self.restored) = (Some(membership), None, false, None);
        Ok(comm)
    }

    /// Sets the folder for the last commit if the remaining ranks cannot go on: too few are left, or it cannot be
    /// restored. It becomes a checkpoint, to which each of them writes the pieces it holds, unless the folder has a
    /// later one. Call it on every rank, in each world.
    pub fn save_orphaned_in(&mut self, folder: &Folder) {
        self.orphaned = Some(folder.clone());
    }

    /// Keeps a value until the run is over, across its worlds: a signal handler, for example. Replaces the value kept
    /// before.
    pub fn keep(&mut self, what: impl Any + Send) {
        self.kept = Some(Box::new(what));
    }

    /// Writes the pieces that this rank holds to the folder of `save_orphaned_in`, if set. Ignores errors.
    pub(super) fn save_orphaned(&self) {
        let (Some(folder), Some(now)) = (&self.orphaned, &self.now) else { return };
        // A later commit may lack pieces that an earlier one has.
        for commit in self.store.0.values().rev() {
            let (what, holder) = ((commit.step, &commit.manifest), now.comm.world_rank());
            if folder.save_held(holder, what, &commit.pieces, PATIENCE).unwrap_or(false) {
                return;
            }
        }
    }

    fn membership(&self) -> Result<&Membership<R>> {
        let none = || Error::usage("ElasticWorld", "there is no world yet: `Elastic::run` passes a program its world");
        self.now.as_ref().ok_or_else(none)
    }

    /// The ranks of this world. Build everything that depends on ranks over it: model, training step, loader.
    ///
    /// # Errors
    /// Outside of [`Elastic::run`](super::Elastic::run), where there is no world.
    pub fn comm(&self) -> Result<Comm<R>> {
        Ok(self.membership()?.comm.clone())
    }

    /// The number of this world, from 0.
    pub fn generation(&self) -> u64 {
        self.now.as_ref().map_or(0, |now| now.generation)
    }

    /// Tells whether the ranks have agreed to meet again, because others wait to join.
    pub fn is_changing(&self) -> bool {
        self.is_changing
    }

    /// The generation and the optimizer step of the commit that [`restore`](ElasticWorld::restore) loaded in this
    /// world. `None` before, or if there was no commit.
    pub fn restored_commit(&self) -> Option<(u64, u64)> {
        self.restored
    }

    /// Restores the last commit of the run; none at its beginning. Collective: all ranks call it, once the state is
    /// built, and before they train.
    ///
    /// # Errors
    /// On all ranks, with nothing changed, if there was a commit and too much of it is lost, or it does not fit the
    /// state.
    #[track_caller]
    pub fn restore(&mut self, state: &mut (impl Checkpointed<R> + ?Sized)) -> Result<Option<Restored>> {
        self.restore_if(state, |_| Ok(()))
    }

    /// Restores the last commit, as [`restore`](ElasticWorld::restore) does, if `check` accepts its notes on all ranks.
    ///
    /// # Errors
    /// The errors of [`restore`](ElasticWorld::restore), and of `check`.
    #[track_caller]
    pub fn restore_if(
        &mut self,
        state: &mut (impl Checkpointed<R> + ?Sized),
        check: impl FnOnce(&CheckpointNotes) -> Result<()>,
    ) -> Result<Option<Restored>> {
        let Membership { comm, committed, .. } = self.membership()?;
        // Checked first, so that a rank with another setting leaves before anything is restored.
        let Placing { copies, message, .. } = &self.placing;
        comm.agree("the number of copies (`Elastic::copies`)", &(*copies as u64).to_le_bytes())?;
        comm.agree("the message limit (`Elastic::message_limit`)", &(*message as u64).to_le_bytes())?;
        let restored = restore(&self.store, (comm, self.placing.message), *committed, state, check);
        // No world goes on from this commit then: the held pieces would vanish with the ranks.
        let restored = restored.inspect_err(|error| {
            if !self.is_of_another(error) {
                self.save_orphaned();
            }
        })?;
        self.commits = Some(0);
        self.restored = restored.as_ref().map(|restored| (restored.generation, restored.step));
        Ok(restored)
    }

    /// Commits `state` after `step` updates, with rank 0's `notes`: a world that loses ranks later resumes from here.
    /// All ranks call it at the same point, first right after [`restore`](ElasticWorld::restore): only then are there
    /// copies in this world.
    ///
    /// # Errors
    /// On all ranks, if it fails on one, or if [state would be lost](lost_at_resize) at another
    /// number of ranks. Also if ranks wait to join, after the commit: pass this error on to
    /// [`Elastic::run`](super::Elastic::run), where all ranks meet again.
    #[track_caller]
    pub fn commit(
        &mut self,
        step: u64,
        state: &(impl Checkpointed<R> + ?Sized),
        notes: &CheckpointNotes,
    ) -> Result<()> {
        let Membership { comm, generation, .. } = self.membership()?;
        let (comm, generation) = (comm.clone(), *generation);
        let Some(number) = self.commits else {
            let why =
                "the last commit must be restored first: call `restore` in each world, right after the state is made";
            return Err(Error::usage(COMMIT, why));
        };
        let id = CommitId { generation, number };
        let snapshot = match lost_at_resize(state) {
            Some(why) => Err(Error::unsupported(COMMIT, why)),
            None => Snapshot::of(state),
        };
        self.store.add(&comm, (id, step), snapshot, notes, &self.placing)?;
        // After this exchange, every rank has the commit, with its copies.
        let newcomers = comm.exchange_equal([u8::from(self.rendezvous.newcomers() > 0)])?;
        self.commits = Some(number + 1);
        self.store.forget_before(id);
        self.rendezvous.committed();
        self.is_changing = newcomers.iter().any(|[waits]| *waits != 0);
        if self.is_changing {
            return Err(Error::usage(COMMIT, CHANGES).on_rank(comm.world_rank()));
        }
        Ok(())
    }

    /// Tells whether an error is the one by which a commit makes all ranks meet again. Any later failure is the rank's
    /// own.
    pub(super) fn is_of_change(&self, error: &Error) -> bool {
        self.is_changing && matches!(error.kind(), ErrorKind::Usage { op: COMMIT, why } if why == CHANGES)
    }

    /// Tells whether an error comes from another rank, so that this one can go on. It names another rank; or the calls
    /// of newcomers differ from those of earlier ranks, before the first commit with them.
    pub(super) fn is_of_another(&self, error: &Error) -> bool {
        let Some(now) = &self.now else { return false };
        let own = now.comm.world_rank();
        let is_untried = now.newcomers > 0 && self.commits.is_none_or(|commits| commits == 0);
        match error.kind() {
            ErrorKind::Peer { peer, .. } => *peer != own,
            ErrorKind::Timeout { missing, .. } => !missing.contains(&own),
            ErrorKind::Mismatch { .. } => is_untried && !self.store.0.is_empty(),
            _ => false,
        }
    }
}
