//! This process among others.

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

use comm::{Comm, Communicator, Places, engine::guarded};
use numcore::{Error, Result, Runtime};
use parking_lot::Mutex;

use super::{
    communicator::ProcessCommunicator,
    moves::Limits,
    progress::{Command, Progress},
    transport::Transport,
    world::World,
};
use crate::Launch;

/// Bytes of one message: a multiple of every element's size. A call whose messages keep arriving is not late, so one must pass within a
/// deadline on the slowest network.
const MESSAGE: usize = 64 << 20;
/// The largest such multiple that is a power of two, and a count MPI takes.
const LARGEST_MESSAGE: usize = 1 << 30;
/// How long the end of the other processes is waited for.
const END_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// Bytes of a chunk of a reduction: two of them and what they are combined with stay in a core's cache.
const CHUNK: usize = 512 << 10;

/// This process among others, from the beginning of what joins them to its end, which comes when this is dropped: all processes must drop theirs.
///
/// One thread of its own owns the [`Transport`] and moves everything; the thread that made this, and all others, compute meanwhile.
pub struct Processes {
    link: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    rank: usize,
    size: usize,
    local_rank: usize,
    /// Why those that are left when a process dies cannot go on, if they cannot.
    pub(crate) no_recovery: Option<String>,
    worlds: AtomicU64,
    failed: AtomicBool,
    end_timeout: Duration,
    timeout: Duration,
    places: Places,
    limits: Limits,
}

/// What the thread that owns a transport says of it first.
struct Opened {
    rank: usize,
    size: usize,
    no_recovery: Option<String>,
}

impl Processes {
    /// The processes that a transport joins, which a thread of its own opens. Calls may take 60 seconds.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn over(open: impl FnOnce() -> Result<Box<dyn Transport>> + Send + 'static) -> Result<Processes> {
        const OP: &str = "Processes::over";
        let ((link, commands), (ready, outcome)) = (mpsc::channel(), mpsc::sync_channel(1));
        let thread = thread::Builder::new().name("progress".into()).spawn(move || own(open, commands, &ready));
        let thread = thread.map_err(|e| Error::argument(OP, format!("no thread to move messages: {e}")))?;
        let lost = |_| Error::argument(OP, "the thread that opens the transport has ended");
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
            timeout: Duration::from_secs(60),
            places: Places::Same,
            limits: Limits { message: MESSAGE, chunk: CHUNK },
        })
    }

    /// How long calls of worlds made from now on may take before every rank gets an error.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long this process waits at its end for the others to come to theirs, where the transport needs that (MPI): then all are ended. One hour
    /// unless it is said, since one may save or export what all have trained.
    pub fn end_timeout(mut self, timeout: Duration) -> Self {
        self.end_timeout = timeout;
        self
    }

    /// Lets ranks make the same call from different places in the program.
    pub fn any_place(mut self) -> Self {
        self.places = Places::Any;
        self
    }

    /// Bytes of one message at most, at least 1 and at most 2³⁰: what is longer goes in pieces. 64 MiB unless it is said; 4 MiB in a folder.
    ///
    /// A call is late when none of its messages has passed for the [timeout](Processes::timeout).
    pub fn message_limit(mut self, bytes: usize) -> Self {
        self.limits.message = bytes.clamp(1, LARGEST_MESSAGE);
        self
    }

    /// Bytes of the chunks that reductions go in: one is combined while the next arrives. Half a mebibyte unless it is said.
    pub fn chunk(mut self, bytes: usize) -> Self {
        self.limits.chunk = bytes.max(1);
        self
    }

    /// This process among those on its host, where something else than the environment says it.
    pub(crate) fn local(mut self, rank: usize) -> Self {
        self.local_rank = rank;
        self
    }

    /// This process among all.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// This process among those on its host, as the launcher says: which GPU to take. 0 where it says nothing.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// A communicator of all processes. Every process makes its worlds in the same order; a failure ends the one it happened in.
    pub fn world<R: Runtime>(&self, rt: &R) -> Result<Comm<R>> {
        let all: Vec<usize> = (0..self.size).collect();
        let own = self.world_of(&all, rt)?;
        own.ok_or_else(|| Error::argument("Processes::world", "a world of all processes has no place for this one"))
    }

    /// A communicator of these processes, which keep their ranks in messages; none on the others, which call this too.
    pub fn world_of<R: Runtime>(&self, ranks: &[usize], rt: &R) -> Result<Option<Comm<R>>> {
        self.world_with(ranks, rt, self.timeout, self.places)
    }

    /// A world like that of [`world_of`](Processes::world_of), with a deadline and a rule for places of its own.
    pub fn world_with<R: Runtime>(
        &self,
        ranks: &[usize],
        rt: &R,
        timeout: Duration,
        places: Places,
    ) -> Result<Option<Comm<R>>> {
        let number = self.worlds.fetch_add(1, Ordering::SeqCst);
        if let Some(absent) = ranks.iter().find(|&&rank| rank >= self.size) {
            let why = format!("there is no process {absent} among {}", self.size);
            return Err(Error::argument("Processes::world_of", why));
        }
        if let Some(twice) = ranks.iter().enumerate().find_map(|(i, rank)| ranks[..i].contains(rank).then_some(rank)) {
            return Err(Error::argument("Processes::world_of", format!("process {twice} is named twice")));
        }
        let Some(rank) = ranks.iter().position(|&rank| rank == self.rank) else { return Ok(None) };
        let world = World::new(number, ranks.into(), timeout, places);
        self.command("Processes::world_of", Command::Enter(world.clone()))?;
        let own = ProcessCommunicator::world(self.link.clone(), &world, rank, rt.clone(), self.limits)?;
        Ok(Some(Arc::new(own)))
    }

    /// A communicator of the processes that are left after others have died, or have come to their end, which keep their ranks in messages. All that are left call
    /// it; it blocks until they know of the same losses. Over MPI it needs Open MPI 5 and `mpirun --with-ft ulfm`: without it the launcher ends
    /// all processes when one dies.
    pub fn recover<R: Runtime>(&self, rt: &R) -> Result<Comm<R>> {
        self.recover_within(rt, self.timeout)
    }

    /// Recovers as [`recover`](Processes::recover) does, with a time of its own.
    pub(crate) fn recover_within<R: Runtime>(&self, rt: &R, timeout: Duration) -> Result<Comm<R>> {
        let (outcome, end) = mpsc::sync_channel(1);
        let made = self.worlds.load(Ordering::SeqCst);
        self.command("Processes::recover", Command::Recover { made, timeout, outcome })?;
        let (number, left) = end.recv().map_err(|_| ended("Processes::recover"))??;
        self.worlds.store(number, Ordering::SeqCst);
        let own = self.world_of(&left, rt)?;
        // From here on this process is as good as one that never failed: at its end it waits for the others.
        self.failed.store(false, Ordering::SeqCst);
        own.ok_or_else(|| Error::argument("Processes::recover", "the processes that are left do not name this one"))
    }

    /// Runs `program` on this rank of a world of all processes. Whatever ends it early, an error or a panic, reaches the other ranks,
    /// and comes back as an error: a `main` that returns it exits with a code that is not 0.
    pub fn run<R: Runtime, T>(
        &self,
        runtime: impl FnOnce(usize) -> Result<R>,
        program: impl FnOnce(Comm<R>) -> Result<T>,
    ) -> Result<T> {
        // Spans of this thread, and of those that are started on its behalf, are this rank's.
        numcore::trace::set_rank(self.rank);
        let rt = runtime(self.local_rank());
        let outcome = match rt {
            Ok(rt) => guarded(&self.world(&rt)?, program),
            Err(error) => {
                // The others wait for this rank in a world: they are told why it does not come.
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

    /// Takes note that ranks could not meet: some may never come to their end, so this process does not wait for them for ever at its own.
    pub(crate) fn note_failure(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    /// Ends it, as dropping does: over MPI it blocks until all processes have come to their end. Calls afterwards are errors.
    pub fn finish(&self) {
        let Some(thread) = self.thread.lock().take() else { return };
        let most = if self.failed.load(Ordering::SeqCst) { self.timeout } else { Duration::MAX };
        let patience = most.min(self.end_timeout);
        drop(self.link.send(Command::Finish(patience)));
        // The thread ends the process rather than panic.
        drop(thread.join());
    }

    /// Waits until what the others are told has left: whoever has failed may exit at once.
    fn flush(&self) {
        let (told, flushed) = mpsc::sync_channel(0);
        if self.link.send(Command::Flush(told)).is_ok() {
            // Ended by the thread dropping its end.
            let _ = flushed.recv_timeout(self.timeout);
        }
    }

    fn command(&self, op: &'static str, command: Command) -> Result<()> {
        self.link.send(command).map_err(|_| ended(op))
    }
}

fn ended(op: &'static str) -> Error {
    Error::argument(op, "the thread that moves messages has ended")
}

/// The life of the thread that owns the transport.
fn own(
    open: impl FnOnce() -> Result<Box<dyn Transport>>,
    commands: mpsc::Receiver<Command>,
    ready: &SyncSender<Result<Opened>>,
) {
    let made = open().and_then(|transport| Progress::new(transport, commands));
    let progress = match made {
        Ok(progress) => progress,
        // Whoever opens it waits for it.
        Err(error) => return drop(ready.send(Err(error))),
    };
    let transport = &progress.transport;
    let (rank, size, no_recovery) = (transport.rank(), transport.size(), transport.reports_deaths().err());
    drop(ready.send(Ok(Opened { rank, size, no_recovery })));
    if catch_unwind(AssertUnwindSafe(|| progress.run())).is_err() {
        // Nothing that is in flight would ever end: the launcher ends the others, or their deadlines do.
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
