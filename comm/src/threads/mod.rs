//! Ranks as threads of one process: the embedded default, and the test bed of everything above.
//!
//! A call is posted in the round of its number. The rank that arrives last cuts the round into tasks, one for each
//! rank's worker thread. Together these read and write all ranks' memory in place. So nothing is copied through
//! mailboxes, combining is always in rank order, and all of it overlaps with the ranks' computation.
//!
//! One lock guards the rounds of all groups of a world: it is held to post, to take up results, never while anything is
//! computed. A rank that fails, disagrees or leaves ends every round of the world at once, with the cause for the
//! waiting ranks.

mod rendezvous;
mod round;
mod task;
mod world;

use std::{
    fmt,
    panic::Location,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use numcore::{DeviceId, Error, Result, Runtime, TensorMut};

use super::{Call, Comm, Communicator, Deadlines, Group, Guarantees, Pending, Places, Work};
use super::{
    failure::FailureReason,
    matching::{SplitPlace, split_place},
};
use crate::sync::{self, Instant, mpsc};
pub use rendezvous::{ThreadRendezvous, ThreadSeat};
use round::{RankCall, ResultSlot};
use world::{Name, World};

/// The communicator of a rank among threads. Made by [`Ranks::run`](super::Ranks::run), or all at once by
/// [`ThreadCommunicator::world`].
pub struct ThreadCommunicator<R: Runtime> {
    world: Arc<World<R>>,
    group: usize,
    rank: usize,
    of: Group,
    rt: R,
    numbers: AtomicU64,
}

impl<R: Runtime> ThreadCommunicator<R> {
    /// Makes the communicators of a world, one for each runtime, for one thread each. A call that takes longer than
    /// `deadlines` allow is an error on every rank.
    pub fn world(runtimes: Vec<R>, deadlines: impl Into<Deadlines>) -> Result<Vec<Comm<R>>> {
        Self::members(runtimes, deadlines, Places::Same)
    }

    /// Makes the communicators of a [`world`](ThreadCommunicator::world); `places` sets the source lines from which
    /// matching calls may come.
    pub fn members(runtimes: Vec<R>, deadlines: impl Into<Deadlines>, places: Places) -> Result<Vec<Comm<R>>> {
        if runtimes.is_empty() {
            return Err(Error::range("ThreadCommunicator", "number of ranks", 0, "at least 1"));
        }
        let devices: Vec<DeviceId> = runtimes.iter().map(Runtime::device).collect();
        if let Some(rank) = devices.iter().position(|&device| device != devices[0]) {
            let why = format!(
                "rank 0 is on {}, rank {rank} on {}: ranks of one process read each other's memory in place, so all must be on one device; on several GPUs they need \
                 the engine for NCCL",
                devices[0], devices[rank]
            );
            return Err(Error::unsupported("ThreadCommunicator", why));
        }
        let (world, seats) = (World::new(runtimes.len(), deadlines.into(), places), (0..runtimes.len()).collect());
        let member = |(rank, rt): (usize, R)| Ok(Arc::new(Self::join(&world, None, &seats, rank, rt)?) as Comm<R>);
        runtimes.into_iter().enumerate().map(member).collect()
    }

    fn join(world: &Arc<World<R>>, name: Name, seats: &Arc<[usize]>, rank: usize, rt: R) -> Result<Self> {
        let (queue, tasks) = mpsc::channel();
        let (own, seat) = (rt.fork()?, seats[rank]);
        sync::spawn(format!("comm-{seat}"), move || task::work(own, &tasks))
            .map_err(|e| Error::io(format!("thread comm-{seat}"), e))?;
        let group = world.enter(name, seats, rank, queue);
        let called = match name {
            None => "world".to_string(),
            Some((_, number, color)) => format!("split {number}, color {color}"),
        };
        Ok(ThreadCommunicator {
            world: world.clone(),
            group,
            rank,
            of: Group::new(&called, rank, seats.clone()),
            rt,
            numbers: AtomicU64::new(0),
        })
    }
}

impl<R: Runtime> Communicator<R> for ThreadCommunicator<R> {
    fn group(&self) -> &Group {
        &self.of
    }

    fn runtime(&self) -> &R {
        &self.rt
    }

    fn timeout(&self) -> Duration {
        self.world.deadlines.call
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees::STRICT
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        let op = call.what().name();
        if self.rt.is_capturing() {
            let why = "ranks that are threads take no part in captured steps, whose collectives go over NCCL";
            return Err(Error::usage(op, why).on_rank(self.world_rank()));
        }
        let slot = ResultSlot::default();
        let job = RankCall { ready: self.rt.record()?, call, slot: slot.clone() };
        let (key, timeout) = self.world.post(self.group, self.rank, job).map_err(|f| f.error(op, self.world_rank()))?;
        let (world, rt) = (self.world.clone(), self.rt.clone());
        Ok(Work::pending(PostedCall {
            world,
            rt,
            op,
            key,
            world_rank: self.world_rank(),
            group: self.group,
            since: Instant::now(),
            timeout,
            slot,
        }))
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let place = split_place(self, color, key, at)?;
        let number = self.world.splits(self.group, self.rank);
        let Some(SplitPlace { color, rank, members }) = place else { return Ok(None) };
        let name = Some((self.group, number, color));
        Ok(Some(Arc::new(Self::join(&self.world, name, &members.into(), rank, self.rt.clone())?)))
    }

    fn poll(&self) -> Result<()> {
        match self.world.failure() {
            Some(failure) => Err(failure.error("poll", self.world_rank())),
            None => Ok(()),
        }
    }

    fn abort_for(&self, world_rank: usize, cause: &str) {
        self.world.fail(FailureReason::Peer { peer: world_rank, cause: cause.into() });
    }
}

impl<R: Runtime> Drop for ThreadCommunicator<R> {
    fn drop(&mut self) {
        self.world.leave(self.group, self.rank);
    }
}

impl<R: Runtime> fmt::Debug for ThreadCommunicator<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadCommunicator(rank {} of {})", self.rank, self.size())
    }
}

/// A call that was posted.
struct PostedCall<R: Runtime> {
    world: Arc<World<R>>,
    rt: R,
    op: &'static str,
    group: usize,
    key: round::RoundKey,
    world_rank: usize,
    since: Instant,
    /// The time from `since` to its deadline.
    timeout: Duration,
    slot: ResultSlot<R>,
}

impl<R: Runtime> Pending<Option<TensorMut<R>>> for PostedCall<R> {
    fn wait(self: Box<Self>) -> Result<Option<TensorMut<R>>> {
        let done = self.world.wait(self.group, self.key, (self.since, self.timeout), &self.slot);
        let done = done.map_err(|f| f.error(self.op, self.world_rank))?;
        done.after.iter().try_for_each(|event| self.rt.wait(event))?;
        Ok(done.memory)
    }

    fn is_done(&self) -> bool {
        self.world.is_over(&self.slot)
    }
}
