//! The world of an elastic run, as a rank has it.

use numcore::{Error, ErrorKind, Result, Runtime};

use super::{
    restore::{Restored, restore},
    store::{CommitId, Store},
};
use crate::{
    checkpoint::{Checkpointed, Snapshot},
    comm::{Collectives, Comm, Communicator, Membership, Rendezvous},
    train::CheckpointNotes,
};

const COMMIT: &str = "ElasticWorld::commit";
/// What a commit says after which all ranks meet again.
const CHANGES: &str = "others wait to be taken in, so the ranks meet again: hand this error on to `Elastic::run`";

/// The ranks of now, and what this one holds of commits. [`Elastic::run`](super::Elastic::run) gives it to the program.
pub struct ElasticWorld<R: Runtime> {
    pub(super) meeting: Box<dyn Rendezvous<R>>,
    pub(super) copies: usize,
    store: Store,
    now: Option<Membership<R>>,
    /// Commits of this generation so far; none before the world has taken up what there was.
    commits: Option<u64>,
    is_changing: bool,
    taken_up: Option<(u64, u64)>,
}

impl<R: Runtime> ElasticWorld<R> {
    pub(super) fn new(meeting: Box<dyn Rendezvous<R>>) -> Self {
        let store = Store::default();
        ElasticWorld { meeting, copies: 1, store, now: None, commits: None, is_changing: false, taken_up: None }
    }

    /// The world as it is next.
    pub(super) fn meet(&mut self) -> Result<Comm<R>> {
        let membership = self.meeting.meet()?;
        let comm = membership.comm.clone();
        (self.now, self.commits, self.is_changing, self.taken_up) = (Some(membership), None, false, None);
        Ok(comm)
    }

    fn membership(&self) -> Result<&Membership<R>> {
        let none =
            || Error::argument("ElasticWorld", "the ranks have not met: `Elastic::run` gives a program its world");
        self.now.as_ref().ok_or_else(none)
    }

    /// The ranks of this world. A program makes everything that has to do with ranks over it: model, training step, loader.
    ///
    /// # Errors
    /// Outside of [`Elastic::run`](super::Elastic::run), where there is no world.
    pub fn comm(&self) -> Result<Comm<R>> {
        Ok(self.membership()?.comm.clone())
    }

    /// Which world it is, from 0.
    pub fn generation(&self) -> u64 {
        self.now.as_ref().map_or(0, |now| now.generation)
    }

    /// Whether the ranks have agreed to meet again, since others wait to be taken in.
    pub fn is_changing(&self) -> bool {
        self.is_changing
    }

    /// The commit that this world has [taken up](ElasticWorld::restore): the world that made it, and the updates up to it.
    pub fn taken_up(&self) -> Option<(u64, u64)> {
        self.taken_up
    }

    /// Takes up what the run has come to: all ranks call it, once the state is made, and before they train. None at the beginning of a run.
    ///
    /// # Errors
    /// On all ranks, if something was committed and too much of it is lost, or it does not fit the state. Nothing is changed then.
    #[track_caller]
    pub fn restore(&mut self, state: &mut (impl Checkpointed<R> + ?Sized)) -> Result<Option<Restored>> {
        self.restore_if(state, |_| Ok(()))
    }

    /// Takes up what the run has come to, as [`restore`](ElasticWorld::restore) does, if `check` finds nothing wrong with its notes on any rank.
    ///
    /// # Errors
    /// Those of [`restore`](ElasticWorld::restore), and of `check`.
    #[track_caller]
    pub fn restore_if(
        &mut self,
        state: &mut (impl Checkpointed<R> + ?Sized),
        check: impl FnOnce(&CheckpointNotes) -> Result<()>,
    ) -> Result<Option<Restored>> {
        let Membership { comm, committed, .. } = self.membership()?;
        // Before anything is taken up: whoever has come with another number is the one that leaves.
        comm.agree("the number of copies (`Elastic::copies`)", &(self.copies as u64).to_le_bytes())?;
        let restored = restore(&self.store, comm, *committed, state, check)?;
        self.commits = Some(0);
        self.taken_up = restored.as_ref().map(|restored| (restored.generation, restored.step));
        Ok(restored)
    }

    /// Commits what `state` has after so many steps, and `notes`, which are rank 0's: a world that loses ranks from here on goes on from there. All ranks call it at
    /// one point, first right after [`restore`](ElasticWorld::restore): only then are there copies in this world.
    ///
    /// # Errors
    /// What fails on a rank, on all; and where [something would be lost](Checkpointed::lost_at_another_size) at another size. And if ranks wait to be taken in: it leads out of the program, back to [`Elastic::run`](super::Elastic::run), where all meet again;
    /// everything is committed then.
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
            let why = "what the run has come to must be taken up first: call `restore` in each world, right after the state is made";
            return Err(Error::argument(COMMIT, why));
        };
        let id = CommitId { generation, number };
        let snapshot = match state.lost_at_another_size() {
            Some(why) => Err(Error::argument(COMMIT, why)),
            None => Snapshot::of(state),
        };
        self.store.add(&comm, (id, step), snapshot, notes, self.copies)?;
        // Where this returns, every rank has the commit, with its copies.
        let newcomers = comm.exchange_equal([u8::from(self.meeting.newcomers() > 0)])?;
        self.commits = Some(number + 1);
        self.store.forget_before(id);
        self.meeting.committed();
        self.is_changing = newcomers.iter().any(|[waits]| *waits != 0);
        if self.is_changing {
            return Err(Error::argument(COMMIT, CHANGES).on_rank(comm.world_rank()));
        }
        Ok(())
    }

    /// Whether it is the error with which a commit leads out of the program: whatever else fails after that is the rank's own.
    pub(super) fn is_of_change(&self, error: &Error) -> bool {
        self.is_changing && matches!(error.kind(), ErrorKind::Argument { op: COMMIT, why } if why == CHANGES)
    }

    /// Whether an error of this rank's program is another rank's, so that this one can go on: it names one, or the world has taken in ranks that make other calls than
    /// those that were there, before there was a commit with them.
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
