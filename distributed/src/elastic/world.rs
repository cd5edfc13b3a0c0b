//! The world of an elastic run, as a rank has it.

use std::{any::Any, time::Duration};

use numcore::{Error, ErrorKind, Result, Runtime};

use super::{
    restore::{Restored, restore},
    store::{CommitId, Placing, Store},
};
use crate::{
    checkpoint::{Checkpointed, Folder, Snapshot},
    comm::{Collectives, Comm, Communicator, Membership, Rendezvous},
    train::CheckpointNotes,
};

/// How long the pieces of others are waited for.
const PATIENCE: Duration = Duration::from_secs(10);
const COMMIT: &str = "ElasticWorld::commit";
/// What a commit says after which all ranks meet again.
const CHANGES: &str = "others wait to be taken in, so the ranks meet again: hand this error on to `Elastic::run`";

/// The ranks of now, and what this one holds of commits. [`Elastic::run`](super::Elastic::run) gives it to the program.
pub struct ElasticWorld<R: Runtime> {
    pub(super) meeting: Box<dyn Rendezvous<R>>,
    pub(super) placing: Placing,
    store: Store,
    /// Where what is held is written if the run cannot go on.
    stranded: Option<Folder>,
    /// What lives as long as the run.
    kept: Option<Box<dyn Any + Send>>,
    now: Option<Membership<R>>,
    /// Commits of this generation so far; none before the world has taken up what there was.
    commits: Option<u64>,
    is_changing: bool,
    taken_up: Option<(u64, u64)>,
}

impl<R: Runtime> ElasticWorld<R> {
    pub(super) fn new(meeting: Box<dyn Rendezvous<R>>) -> Self {
        let (store, placing) = (Store::default(), Placing::default());
        let (now, commits, taken_up) = (None, None, None);
        ElasticWorld { meeting, placing, store, stranded: None, kept: None, now, commits, is_changing: false, taken_up }
    }

    /// The world as it is next.
    pub(super) fn meet(&mut self) -> Result<Comm<R>> {
        let membership = self.meeting.meet()?;
        let comm = membership.comm.clone();
        (self.now, self.commits, self.is_changing, self.taken_up) = (Some(membership), None, false, None);
        Ok(comm)
    }

    /// Where the last commit is written if the ranks that are left cannot go on: too few are left, or it cannot be taken up. It is a checkpoint then, of which each of them
    /// writes what it holds; none where it is older than the latest there. Every rank says it, in each world.
    pub fn save_stranded_in(&mut self, folder: &Folder) {
        self.stranded = Some(folder.clone());
    }

    /// Keeps something until the run is over, between its worlds too, in place of what was kept before: whatever notes signals, for one.
    pub fn keep(&mut self, what: impl Any + Send) {
        self.kept = Some(Box::new(what));
    }

    /// Writes what this rank holds, where that was asked for. What fails here changes nothing.
    pub(super) fn save_stranded(&self) {
        let (Some(folder), Some(now)) = (&self.stranded, &self.now) else { return };
        // A later commit may lack pieces, which the one before it has.
        for commit in self.store.0.values().rev() {
            let (what, holder) = ((commit.step, &commit.manifest), now.comm.world_rank());
            if folder.save_held(holder, what, &commit.pieces, PATIENCE).unwrap_or(false) {
                return;
            }
        }
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
        let Placing { copies, message, .. } = &self.placing;
        comm.agree("the number of copies (`Elastic::copies`)", &(*copies as u64).to_le_bytes())?;
        comm.agree("the message limit (`Elastic::message_limit`)", &(*message as u64).to_le_bytes())?;
        let restored = restore(&self.store, (comm, self.placing.message), *committed, state, check);
        // Nobody goes on from it then: what is held would be gone with the ranks.
        let restored = restored.inspect_err(|error| {
            if !self.is_of_another(error) {
                self.save_stranded();
            }
        })?;
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
        self.store.add(&comm, (id, step), snapshot, notes, &self.placing)?;
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
