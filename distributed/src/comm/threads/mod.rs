//! Ranks as threads of one process: the embedded default, and the test bed of everything above.
//!
//! A call is posted in the round of its number; the rank that arrives last cuts the round into tasks, one for each rank's worker
//! thread, which together read and write all ranks' memory in place. So nothing is copied through mailboxes, combining is always in
//! the order of ranks, and all of it overlaps with what the ranks compute.
//!
//! One lock guards the rounds of all groups of a world: it is held to post, to take up results, never while anything is computed.
//! A rank that fails, disagrees or leaves ends every round of the world at once: who waits sees why.

mod round;
mod task;
mod world;

use std::{fmt, panic::Location, sync::Arc, time::Duration};

use numcore::{Error, ErrorKind, Result, Runtime, TensorMut};

use super::{Call, Comm, Communicator, Pending, Places, Work, collectives::Make};
use crate::sync::{self, Instant, mpsc};
use round::{Job, Slot};
use world::{Failure, Why, World};

/// A rank among threads. Made by [`Ranks::run`](super::Ranks::run), or all at once by [`ThreadCommunicator::world`].
pub struct ThreadCommunicator<R: Runtime> {
    world: Arc<World<R>>,
    group: usize,
    rank: usize,
    size: usize,
    /// Its rank in the world.
    seat: usize,
    rt: R,
}

impl<R: Runtime> ThreadCommunicator<R> {
    /// The communicators of a world, one for each runtime, to be given to as many threads. A call that takes longer than `timeout` is
    /// an error on every rank.
    pub fn world(runtimes: Vec<R>, timeout: Duration) -> Result<Vec<Comm<R>>> {
        Self::members(runtimes, timeout, Places::Same)
    }

    /// As [`world`](ThreadCommunicator::world); `places` tells from where in the program calls may come.
    pub fn members(runtimes: Vec<R>, timeout: Duration, places: Places) -> Result<Vec<Comm<R>>> {
        if runtimes.is_empty() {
            return Err(Error::argument("ThreadCommunicator", "a world needs at least one rank"));
        }
        let (size, world) = (runtimes.len(), World::new(runtimes.len(), timeout, places));
        let group = world.group(None, 0, size);
        let member = |(rank, rt): (usize, R)| Ok(Arc::new(Self::join(&world, group, rank, size, rank, rt)?) as Comm<R>);
        runtimes.into_iter().enumerate().map(member).collect()
    }

    fn join(world: &Arc<World<R>>, group: usize, rank: usize, size: usize, seat: usize, rt: R) -> Result<Self> {
        let (queue, tasks) = mpsc::channel();
        let own = rt.fork()?;
        sync::spawn(format!("comm-{group}-{rank}"), move || task::work(own, &tasks))
            .map_err(|e| Error::argument("ThreadCommunicator", format!("no thread for rank {rank}: {e}")))?;
        world.enter(group, rank, seat, queue);
        Ok(ThreadCommunicator { world: world.clone(), group, rank, size, seat, rt })
    }
}

impl<R: Runtime> Communicator<R> for ThreadCommunicator<R> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn runtime(&self) -> &R {
        &self.rt
    }

    fn timeout(&self) -> Duration {
        self.world.timeout
    }

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        let op = call.what().name();
        let slot = Slot::default();
        let job = Job { ready: self.rt.record()?, call, slot: slot.clone() };
        let key = self.world.post(self.group, self.rank, job).map_err(|f| f.error(op, self.rank))?;
        let (world, rt) = (self.world.clone(), self.rt.clone());
        Ok(Work::pending(Ticket {
            world,
            rt,
            op,
            key,
            rank: self.rank,
            group: self.group,
            since: Instant::now(),
            slot,
        }))
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let own = color.map_or(u64::MAX, |c| c as u64);
        let words: Vec<u8> = [own, key as u64].into_iter().flat_map(u64::to_le_bytes).collect();
        let all = self.exchange_at(&words, at)?;
        let number = self.world.splits(self.group, self.rank);
        let Some(color) = color else { return Ok(None) };
        let word = |b: &[u8], i: usize| b[8 * i..][..8].try_into().map_or(u64::MAX, u64::from_le_bytes);
        let mut members: Vec<(u64, usize)> =
            (0..all.len()).filter(|&r| word(&all[r], 0) == own).map(|r| (word(&all[r], 1), r)).collect();
        members.sort_unstable();
        let rank = members.iter().position(|&(_, r)| r == self.rank).unwrap_or(0);
        let group = self.world.group(Some((self.group, number)), color, members.len());
        Ok(Some(Arc::new(Self::join(&self.world, group, rank, members.len(), self.seat, self.rt.clone())?)))
    }

    fn abort(&self, cause: &str) {
        self.world.fail(Why::Peer { peer: self.rank, cause: cause.into() });
    }
}

impl<R: Runtime> Drop for ThreadCommunicator<R> {
    fn drop(&mut self) {
        self.world.leave(self.group, self.rank);
    }
}

impl<R: Runtime> fmt::Debug for ThreadCommunicator<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadCommunicator(rank {} of {})", self.rank, self.size)
    }
}

/// A call that was posted.
struct Ticket<R: Runtime> {
    world: Arc<World<R>>,
    rt: R,
    op: &'static str,
    group: usize,
    key: round::Key,
    rank: usize,
    since: Instant,
    slot: Slot<R>,
}

impl<R: Runtime> Pending<Option<TensorMut<R>>> for Ticket<R> {
    fn wait(self: Box<Self>) -> Result<Option<TensorMut<R>>> {
        let done = self.world.wait(self.group, self.key, self.since, &self.slot);
        let done = done.map_err(|f| f.error(self.op, self.rank))?;
        done.after.iter().try_for_each(|event| self.rt.wait(event))?;
        Ok(done.memory)
    }

    fn is_done(&self) -> bool {
        self.world.is_over(&self.slot)
    }
}

impl Failure {
    fn error(self, op: &'static str, rank: usize) -> Error {
        let calls = self.calls;
        let kind = match self.why {
            Why::Peer { peer, cause } => ErrorKind::Peer { op, peer, cause: format!("{cause}\n{calls}") },
            Why::Mismatch { why } => ErrorKind::Mismatch { op, why: format!("{why}\n{calls}") },
            Why::Timeout { waited, missing } => ErrorKind::Timeout { op, waited, missing, calls },
        };
        Error::from(kind).on_rank(rank)
    }
}
