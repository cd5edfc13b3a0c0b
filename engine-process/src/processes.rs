//! The handle of this process in a group of processes.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Sender, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use comm::{
    Comm, Communicator, Deadlines, Places,
    engine::{CallKinds, guarded},
};
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

use super::{
    communicator::ProcessCommunicator,
    moves::Limits,
    progress::{Command, Patience, Progress},
    tcp::JoinAddress,
    transport::Transport,
    world::World,
};
use crate::Launch;

/// The default limit of bytes in one message, a multiple of every element's size. A call is not late while its messages
/// keep arriving, so one message must pass within a deadline on the slowest network.
const MESSAGE: usize = 64 << 20;
/// The largest message limit: the largest power of two that fits MPI's counts.
const LARGEST_MESSAGE: usize = 1 << 30;
/// The default time that a process at its end waits for the others to end.
const END_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// The default bytes of a chunk of a reduction. Two chunks and their combination fit a core's cache.
const CHUNK: usize = 512 << 10;

/// This process as one of several that a transport joins. Dropping it leaves them; all processes must drop theirs.
///
/// A separate thread owns the [`Transport`] and moves all data. The thread that made this, and all other threads,
/// compute meanwhile.
pub struct Processes {
    link: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    rank: usize,
    size: usize,
    local_rank: usize,
    /// The reason that survivors of a death cannot recover, if they cannot.
    pub(crate) no_recovery: Option<String>,
    worlds: AtomicU64,
    failed: AtomicBool,
    end_timeout: Duration,
    pub(crate) deadlines: Deadlines,
    /// The kinds of calls so far: survivors of a loss compile no kernels again.
    kinds: Arc<Mutex<CallKinds>>,
    pub(crate) places: Places,
    limits: Limits,
    /// The address at which newcomers join, if there is one.
    pub(crate) join_address: Option<JoinAddress>,
    /// True if this process has joined a running job there.
    pub(crate) is_newcomer: bool,
}

/// Facts about an opened transport, which its thread reports first.
struct Opened {
    rank: usize,
    size: usize,
    no_recovery: Option<String>,
}

impl Processes {
    /// Joins processes by the transport that `open` makes; a separate thread calls `open`. Calls have the default
    /// [`Deadlines`] until [`timeout`](Processes::timeout) sets others.
    ///
    /// # Errors
    /// Errors of `open`, and an error if the thread cannot be started.
    pub fn over(open: impl FnOnce() -> Result<Box<dyn Transport>> + Send + 'static) -> Result<Processes> {
        const OP: &str = "Processes::over";
        let ((link, commands), (ready, outcome)) = (mpsc::channel(), mpsc::sync_channel(1));
        let thread = thread::Builder::new().name("progress".into()).spawn(move || own(open, commands, &ready));
        let thread = thread.map_err(|e| Error::io("thread progress", e))?;
        let lost = |_| Error::internal(OP, "the thread that opens the transport has ended");
        let Opened { rank, size, no_recovery } = outcome.recv().map_err(lost)??;
        Ok(Processes {
            link,
            thread: Mutex::new(Some(thread)),
            rank,
            size,
            local_rank: Launch::from_env().map_or(0, |launch| launch.local_rank),
            no_recovery,
            worlds: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            end_timeout: END_TIMEOUT,
            deadlines: Deadlines::default(),
            kinds: Arc::default(),
            places: Places::Same,
            limits: Limits { message: MESSAGE, chunk: CHUNK },
            join_address: None,
            is_newcomer: false,
        })
    }

    /// Sets the time that a call may take before every rank gets an error, for worlds made from now on.
    pub fn timeout(mut self, deadlines: impl Into<Deadlines>) -> Self {
        self.deadlines = deadlines.into();
        self
    }

    /// Sets the time that this process, at its end, waits for the others to end, where the transport needs that (MPI).
    /// After that time all processes are aborted. The default is one hour, since one rank may save or export the
    /// trained model while others wait.
    pub fn end_timeout(mut self, timeout: Duration) -> Self {
        self.end_timeout = timeout;
        self
    }

    /// Lets ranks make the same call from different source locations.
    pub fn any_place(mut self) -> Self {
        self.places = Places::Any;
        self
    }

    /// Sets the most bytes in one message, clamped to 1 to 2³⁰; longer data goes in pieces. The default is 64 MiB, and
    /// 16 MiB over TCP. All processes must set the same.
    ///
    /// A call is late once none of its messages has passed for the [timeout](Processes::timeout).
    pub fn message_limit(mut self, bytes: usize) -> Self {
        self.limits.message = bytes.clamp(1, LARGEST_MESSAGE);
        self
    }

    /// Sets the bytes of the chunks of a reduction; one is combined while the next arrives. The default is 512 KiB. All
    /// processes must set the same.
    pub fn chunk(mut self, bytes: usize) -> Self {
        self.limits.chunk = bytes.max(1);
        self
    }

    /// Sets the local rank where the environment does not give it.
    pub(crate) fn local(mut self, rank: usize) -> Self {
        self.local_rank = rank;
        self
    }

    /// Sets the address for newcomers, and whether this process is one.
    pub(crate) fn joined_at(mut self, at: Option<JoinAddress>, is_newcomer: bool) -> Self {
        (self.join_address, self.is_newcomer) = (at, is_newcomer);
        self
    }

    /// Takes the settings of `before`, the processes of the world that has ended. Kinds of calls begin anew on all
    /// ranks: newcomers compile their kernels, and the others wait for that.
    pub(crate) fn configured_as(mut self, before: &Processes) -> Self {
        (self.deadlines, self.end_timeout, self.places) = (before.deadlines, before.end_timeout, before.places);
        (self.limits, self.local_rank) = (before.limits, before.local_rank);
        self.joined_at(before.join_address.clone(), before.is_newcomer)
    }

    /// The rank of this process among all.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The rank of this process on its host as the launcher gives it, which usually selects the GPU; 0 if the launcher
    /// gives none.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Makes a communicator of all processes. Every process makes its worlds in the same order. A failure ends only the
    /// world in which it happened.
    pub fn world<R: Runtime>(&self, rt: &R) -> Result<Comm<R>> {
        let all: Vec<usize> = (0..self.size).collect();
        let own = self.world_of(&all, rt)?;
        own.ok_or_else(|| Error::internal("Processes::world", "a world of all processes has no place for this one"))
    }

    /// Makes a communicator of the processes `ranks`, which keep their ranks in messages. All processes call this;
    /// those not in `ranks` get `None`.
    ///
    /// # Errors
    /// An error if `ranks` has a rank that does not exist, or one twice.
    pub fn world_of<R: Runtime>(&self, ranks: &[usize], rt: &R) -> Result<Option<Comm<R>>> {
        self.world_with(ranks, rt, self.deadlines, self.places)
    }

    /// Makes a world as [`world_of`](Processes::world_of) does, with its own deadlines and its own rule for source
    /// locations.
    pub fn world_with<R: Runtime>(
        &self,
        ranks: &[usize],
        rt: &R,
        deadlines: impl Into<Deadlines>,
        places: Places,
    ) -> Result<Option<Comm<R>>> {
        let number = self.worlds.fetch_add(1, Ordering::SeqCst);
        if let Some(absent) = ranks.iter().find(|&&rank| rank >= self.size) {
            return Err(Error::range("Processes::world_of", "process", *absent, format!("in 0..{}", self.size)));
        }
        if let Some(twice) = ranks.iter().enumerate().find_map(|(i, rank)| ranks[..i].contains(rank).then_some(rank)) {
            return Err(Error::range("Processes::world_of", "process", *twice, "named only once"));
        }
        let Some(rank) = ranks.iter().position(|&rank| rank == self.rank) else { return Ok(None) };
        let world = World::new(number, ranks.into(), deadlines.into(), self.kinds.clone(), places);
        self.command("Processes::world_of", Command::Enter(world.clone()))?;
        let own = ProcessCommunicator::world(self.link.clone(), &world, rank, rt.clone(), self.limits)?;
        Ok(Some(Arc::new(own)))
    }

    /// Makes a communicator of the survivors after other processes have died or ended; survivors keep their ranks in
    /// messages. All survivors call it; it blocks until they know of the same losses. Over MPI it needs Open MPI 5 and
    /// `mpirun --with-ft ulfm`; otherwise the launcher ends all processes when one dies.
    pub fn recover<R: Runtime>(&self, rt: &R) -> Result<Comm<R>> {
        self.recover_within(rt, Patience { timeout: self.deadlines.call, leaves_out: None })
    }

    /// Recovers as [`recover`](Processes::recover) does, with its own patience.
    pub(crate) fn recover_within<R: Runtime>(&self, rt: &R, patience: Patience) -> Result<Comm<R>> {
        let (outcome, end) = mpsc::sync_channel(1);
        let made = self.worlds.load(Ordering::SeqCst);
        self.command("Processes::recover", Command::Recover { made, patience, outcome })?;
        let (number, left) = end.recv().map_err(|_| ended("Processes::recover"))??;
        self.worlds.store(number, Ordering::SeqCst);
        let own = self.world_of(&left, rt)?;
        // A recovered process counts as one that never failed: at its end it waits for the others.
        self.failed.store(false, Ordering::SeqCst);
        own.ok_or_else(|| Error::mismatch("Processes::recover", "the survivors do not name this process"))
    }

    /// Runs `program` on this rank of a world of all processes. An error or a panic that ends it early reaches the
    /// other ranks and is returned as an error. A `main` that returns the error exits with a code other than 0.
    pub fn run<R: Runtime, T>(
        &self,
        runtime: impl FnOnce(usize) -> Result<R>,
        program: impl FnOnce(Comm<R>) -> Result<T>,
    ) -> Result<T> {
        // Spans of this thread, and of threads started on its behalf, are recorded under this rank.
        numcore::trace::set_rank(self.rank);
        let rt = runtime(self.local_rank());
        let outcome = match rt {
            Ok(rt) => guarded(&self.world(&rt)?, program),
            Err(error) => {
                // The other ranks wait for this one in a world, so it joins one to report its error.
                let null = self.world(&numcore::NullRuntime::new())?;
                null.abort(&error.to_string());
                Err(error)
            }
        };
        if outcome.is_err() {
            self.failed.store(true, Ordering::SeqCst);
            self.flush();
        }
        outcome
    }

    /// Records that a rendezvous failed. Some processes may then never end, so this one waits for them at most
    /// [`timeout`](Processes::timeout) at its own end.
    pub(crate) fn note_failure(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    /// Leaves the other processes, as dropping does. Over MPI it blocks until all processes have ended. Later calls
    /// return errors.
    pub fn finish(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        let most = if self.failed.load(Ordering::SeqCst) { self.deadlines.call } else { Duration::MAX };
        let patience = most.min(self.end_timeout);
        drop(self.link.send(Command::Finish(patience)));
        // A join error is ignored: the thread aborts the process instead of panicking.
        drop(thread.join());
    }

    /// Waits until all queued messages have been sent, since a failed process may exit at once. Waits at most the
    /// timeout.
    fn flush(&self) {
        let (told, flushed) = mpsc::sync_channel(0);
        if self.link.send(Command::Flush(told)).is_ok() {
            // The thread answers by dropping its end of the channel.
            let _ = flushed.recv_timeout(self.deadlines.call);
        }
    }

    fn command(&self, op: &'static str, command: Command) -> Result<()> {
        self.link.send(command).map_err(|_| ended(op))
    }
}

fn ended(op: &'static str) -> Error {
    Error::usage(op, "the thread that moves messages has ended")
}

/// The body of the thread that owns the transport.
fn own(
    open: impl FnOnce() -> Result<Box<dyn Transport>>,
    commands: mpsc::Receiver<Command>,
    ready: &SyncSender<Result<Opened>>,
) {
    let made = open().and_then(|transport| Progress::new(transport, commands));
    let progress = match made {
        Ok(progress) => progress,
        // The thread that called `over` waits for this error.
        Err(error) => return drop(ready.send(Err(error))),
    };
    let transport = &progress.transport;
    let (rank, size, no_recovery) = (transport.rank(), transport.size(), transport.reports_deaths().err());
    drop(ready.send(Ok(Opened { rank, size, no_recovery })));
    if catch_unwind(AssertUnwindSafe(|| progress.run())).is_err() {
        // No call in flight would ever end. The launcher ends the other processes, or their deadlines do.
        std::process::abort();
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.finish();
    }
}

impl fmt::Debug for Processes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Processes({} of {})", self.rank, self.size)
    }
}
