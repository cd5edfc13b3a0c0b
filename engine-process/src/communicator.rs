//! The communicator of a rank that is a process.

use std::{
    collections::BTreeMap,
    fmt,
    panic::Location,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::Sender,
    },
    time::{Duration, Instant},
};

use comm::{
    ByteExchange, Call, Collective, Comm, Communicator, Fingerprint, Group, Guarantees, Pending, Work,
    engine::{Combiner, FailureReason, SplitPlace, split_place},
};
use numcore::{DType, Error, Result, Runtime, TensorMut};
use parking_lot::Mutex;

use super::{
    flight::Flight,
    job::{CallHeaders, Exchange, Job, Slot},
    message::{GroupId, Key},
    moves::{Done, Limits, Moves, Shared},
    progress::Command,
    stream::LARGEST,
    world::World,
};

/// The communicator of one rank among processes, made by [`Processes::world`](crate::Processes::world) and by `split`.
pub struct ProcessCommunicator<R: Runtime> {
    link: Sender<Command>,
    world: Arc<World>,
    of: Group,
    id: GroupId,
    rt: R,
    combiner: Arc<Mutex<Combiner<R>>>,
    limits: Limits,
    counts: Mutex<Counts>,
    numbers: AtomicU64,
}

/// The numbers of calls of the whole group, of splits, and of transfers to and from each rank, so far.
#[derive(Default)]
struct Counts {
    calls: u64,
    splits: u64,
    sent: BTreeMap<usize, u64>,
    received: BTreeMap<usize, u64>,
}

impl<R: Runtime> ProcessCommunicator<R> {
    pub(crate) fn world(link: Sender<Command>, world: &Arc<World>, rank: usize, rt: R, limits: Limits) -> Result<Self> {
        let of = Group::new("world", rank, world.members.clone());
        let combiner = Arc::new(Mutex::new(Combiner::new(rt.fork()?)));
        let id = [world.number].into();
        Ok(Self::join(link, world.clone(), of, id, rt, combiner, limits))
    }

    fn join(
        link: Sender<Command>,
        world: Arc<World>,
        of: Group,
        id: GroupId,
        rt: R,
        combiner: Arc<Mutex<Combiner<R>>>,
        limits: Limits,
    ) -> Self {
        let (counts, numbers) = (Mutex::default(), AtomicU64::new(0));
        ProcessCommunicator { link, world, of, id, rt, combiner, limits, counts, numbers }
    }

    /// Hands a call to the progress thread; calls are handed over in the order of their numbers.
    fn submit(
        &self,
        (call, timeout): (Fingerprint, Option<Duration>),
        payload: Vec<u8>,
        job: Box<dyn Job>,
    ) -> Result<()> {
        let (n, rank, op) = (self.size(), self.rank(), call.what.name());
        let mut counts = self.counts.lock();
        let key = counts.key(rank, call.what);
        let timeout = self.world.kinds.lock().deadline(&self.id[1..], &call, timeout, self.world.deadlines);
        let peers = match (key, call.what.peer()) {
            (Key::Pair { .. }, Some(peer)) => vec![peer],
            _ => (0..n).filter(|&r| r != rank).collect::<Vec<_>>(),
        };
        self.world.note(self.world_rank(), self.of.members(), key.number(), call.clone());
        let headers = CallHeaders { tags: vec![(0, 0); n], payloads: vec![Vec::new(); n] };
        let now = Instant::now();
        let flight = Flight {
            world: self.world.clone(),
            group: self.id.clone(),
            members: self.of.members().clone(),
            rank,
            key,
            call,
            payload,
            absent: peers.clone(),
            peers,
            headers,
            tags: vec![0..0; n],
            begun: false,
            since: now,
            timeout,
            moved: now,
            left_since: None,
            job,
        };
        self.link.send(Command::Start(Box::new(flight))).map_err(|_| ended(op).on_rank(self.world_rank()))
    }

    fn check(&self, op: &'static str) -> Result<()> {
        self.world.failure().map_or(Ok(()), |failure| Err(failure.error(op, self.world_rank())))
    }

    fn wake(&self) -> impl Fn() + Send + 'static {
        let link = self.link.clone();
        // A failed send is harmless: the thread ends only after all started calls have ended.
        move || drop(link.send(Command::Wake))
    }
}

impl Counts {
    fn key(&mut self, rank: usize, what: Collective) -> Key {
        let next = |count: &mut u64| {
            *count += 1;
            *count - 1
        };
        match what {
            Collective::Send { to } => Key::Pair { from: rank, to, number: next(self.sent.entry(to).or_default()) },
            Collective::Recv { from } => {
                Key::Pair { from, to: rank, number: next(self.received.entry(from).or_default()) }
            }
            _ => Key::All(next(&mut self.calls)),
        }
    }
}

fn ended(op: &'static str) -> Error {
    Error::usage(op, "this process has left the others: its `Processes` was dropped")
}

impl<R: Runtime> Communicator<R> for ProcessCommunicator<R> {
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
        Guarantees { exchanges_on_host: true, ..Guarantees::STRICT }
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        let op = call.what().name();
        self.check(op)?;
        let (slot, ready) = (Slot::new(self.world_rank()), self.rt.record()?);
        let fingerprint = (call.fingerprint(), call.timeout());
        let shared = Shared {
            combiner: self.combiner.clone(),
            members: self.of.members().clone(),
            rank: self.rank(),
            limits: self.limits,
        };
        let job = Moves::new(shared, call, ready, slot.clone());
        self.submit(fingerprint, Vec::new(), Box::new(job))?;
        let (world, rt, world_rank) = (self.world.clone(), self.rt.clone(), self.world_rank());
        Ok(Work::pending(Posted { world, rt, op, world_rank, slot, wake: Box::new(self.wake()) }))
    }

    fn exchange_bytes(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        let ByteExchange { own, of, at, timeout } = exchange;
        if self.size() == 1 {
            return Ok(vec![own.to_vec()]);
        }
        let what = Collective::AllGather;
        self.check(what.name())?;
        if own.len() > LARGEST / 2 {
            let allowed = format!("at most {} to be exchanged at once: gather them as a tensor", LARGEST / 2);
            let error = Error::range(what.name(), "number of bytes", own.len(), allowed);
            return Err(error.on_rank(self.world_rank()));
        }
        let call = Fingerprint {
            what,
            dtype: DType::U8,
            in_place: false,
            header: false,
            parts: [].into(),
            of: Some(of.map_or_else(|| "bytes".into(), |of| format!("bytes of {of}").into())),
            at: at.into(),
        };
        let slot = Slot::new(self.world_rank());
        let job = Exchange { rank: self.rank(), own: own.to_vec(), slot: slot.clone() };
        self.submit((call, timeout), own.to_vec(), Box::new(job))?;
        slot.wait(self.wake()).map_err(|failure| failure.error(what.name(), self.world_rank()))
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let place = split_place(self, color, key, at)?;
        let number = {
            let mut counts = self.counts.lock();
            counts.splits += 1;
            counts.splits - 1
        };
        let Some(SplitPlace { color, rank, members }) = place else { return Ok(None) };
        let of = Group::new(&format!("split {number}, color {color}"), rank, members.into());
        let id = self.id.iter().copied().chain([number, color as u64]).collect();
        let (world, combiner) = (self.world.clone(), self.combiner.clone());
        let group = Self::join(self.link.clone(), world, of, id, self.rt.clone(), combiner, self.limits);
        Ok(Some(Arc::new(group)))
    }

    fn poll(&self) -> Result<()> {
        self.check("poll")
    }

    fn abort_for(&self, world_rank: usize, cause: &str) {
        if self.world.fail(FailureReason::Peer { peer: world_rank, cause: cause.into() }) {
            // A failed send is harmless: the thread ends only after all started calls have ended.
            drop(self.link.send(Command::Failed(self.world.clone())));
        }
    }
}

impl<R: Runtime> Drop for ProcessCommunicator<R> {
    fn drop(&mut self) {
        let (group, members) = (self.id.clone(), self.of.members().clone());
        // A failed send is harmless: without the thread, no process can be notified.
        drop(self.link.send(Command::Leave { group, members }));
    }
}

impl<R: Runtime> fmt::Debug for ProcessCommunicator<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessCommunicator(rank {} of {})", self.rank(), self.size())
    }
}

/// A call handed to the progress thread, whose result the caller can wait for.
struct Posted<R: Runtime> {
    world: Arc<World>,
    rt: R,
    op: &'static str,
    world_rank: usize,
    slot: Arc<Slot<Done<R>>>,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl<R: Runtime> Pending<Option<TensorMut<R>>> for Posted<R> {
    fn wait(self: Box<Self>) -> Result<Option<TensorMut<R>>> {
        let done = self.slot.wait(self.wake).map_err(|failure| failure.error(self.op, self.world_rank))?;
        self.rt.wait(&done.after)?;
        Ok(done.memory)
    }

    fn is_done(&self) -> bool {
        self.slot.is_filled() || self.world.failure().is_some()
    }
}
