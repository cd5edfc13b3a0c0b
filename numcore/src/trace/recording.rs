//! [`Recording`]: from when to when spans are recorded, and what came of it.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use super::{
    ClockSource, Detail, LEVEL, SpanKind,
    clock::{ClockPair, ReadClock, scale},
    local::rank_of,
    names,
    ring::{Ring, WORDS},
};
use crate::{Error, Result};

/// The kind of a record that is a counter's.
pub const COUNTER: u64 = 0xff;

/// Counts the recordings of this process; threads compare it with that of their ring.
static NUMBER: AtomicU64 = AtomicU64::new(0);
static ACTIVE: Mutex<Option<Active>> = Mutex::new(None);

struct Active {
    start: ClockPair,
    options: RecordingOptions,
    rings: Vec<Arc<Ring>>,
}

/// What is recorded, and where moments come from.
#[derive(Clone, Copy, Debug)]
pub struct RecordingOptions {
    /// How much is recorded; at first everything.
    pub detail: Detail,
    /// Spans and counters that are kept of each thread, the last ones, 40 bytes each; at first 65 536.
    pub per_thread: usize,
    /// The clock; at first the system's.
    pub clock: ClockSource,
}

impl Default for RecordingOptions {
    fn default() -> Self {
        RecordingOptions { detail: Detail::default(), per_thread: 1 << 16, clock: ClockSource::default() }
    }
}

/// A recording in progress, of all threads of this process. It ends when it is [stopped](Recording::stop) or dropped.
#[derive(Debug)]
#[must_use = "a recording ends when it is dropped"]
pub struct Recording {
    start: ClockPair,
    read: ReadClock,
}

impl Recording {
    /// Begins to record.
    ///
    /// # Errors
    /// If something is recorded already: a process has one recording at a time.
    pub fn start(options: RecordingOptions) -> Result<Self> {
        let mut active = lock();
        if active.is_some() {
            return Err(Error::argument(
                "Recording::start",
                "something is recorded already; stop that recording first",
            ));
        }
        let read = options.clock.reader();
        let start = ClockPair::now(read);
        *active = Some(Active { start, options, rings: Vec::new() });
        NUMBER.fetch_add(1, Ordering::Relaxed);
        LEVEL.store(options.detail as u8, Ordering::Relaxed);
        Ok(Recording { start, read })
    }

    /// Ends the recording. Spans that are not over are no part of it.
    pub fn stop(self) -> Trace {
        LEVEL.store(0, Ordering::Relaxed);
        let end = ClockPair::now(self.read);
        let rings = lock().as_mut().map(|active| std::mem::take(&mut active.rings)).unwrap_or_default();
        let nanoseconds = scale(self.start, end);
        let threads = rings.iter().map(|ring| ThreadTrace::of(ring, self.start.ticks, &nanoseconds)).collect();
        Trace { threads, length: end.nanoseconds - self.start.nanoseconds }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        LEVEL.store(0, Ordering::Relaxed);
        *lock() = None;
        // Threads find that their ring is of another recording.
        NUMBER.fetch_add(1, Ordering::Relaxed);
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<Active>> {
    ACTIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of the present recording; every one has another.
#[inline]
pub fn number() -> u64 {
    NUMBER.load(Ordering::Relaxed)
}

/// A ring for this thread in the present recording, its clock, and when it began.
pub fn join() -> Option<(Arc<Ring>, ReadClock, ClockPair)> {
    let mut active = lock();
    let active = active.as_mut()?;
    let thread = thread::current();
    let name = thread.name().map_or_else(|| format!("{:?}", thread.id()), String::from);
    let ring = Arc::new(Ring::new(name, active.options.per_thread));
    active.rings.push(Arc::clone(&ring));
    Some((ring, active.options.clock.reader(), active.start))
}

/// What was recorded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Threads in the order of their first span.
    pub threads: Vec<ThreadTrace>,
    /// How long the recording was, in nanoseconds.
    pub length: u64,
}

/// What one thread recorded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ThreadTrace {
    /// The thread's name.
    pub name: String,
    /// Spans in the order in which they ended.
    pub spans: Vec<TraceSpan>,
    /// Counters in the order in which they changed.
    pub counters: Vec<TraceCounter>,
    /// How many spans and counters were overwritten: the oldest ones.
    pub lost: u64,
}

/// A span that is over.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSpan {
    /// What the span is of.
    pub kind: SpanKind,
    /// The name of the operation.
    pub name: Arc<str>,
    /// What it was applied to, if that has a name: a bucket, a unit.
    pub of: Option<Arc<str>>,
    /// The rank that the thread worked for, if it was told.
    pub rank: Option<usize>,
    /// When it began, in nanoseconds since the recording did.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// Bytes that it moved; 0 where that is not known.
    pub bytes: u64,
}

/// A value that changed.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceCounter {
    /// The counter's name.
    pub name: Arc<str>,
    /// Which of several sources of this name it is.
    pub source: u64,
    /// The rank that the thread worked for, if it was told.
    pub rank: Option<usize>,
    /// When it changed, in nanoseconds since the recording began.
    pub at: u64,
    /// The value from then on.
    pub value: u64,
}

impl ThreadTrace {
    fn of(ring: &Ring, begun: u64, nanoseconds: &impl Fn(u64) -> u64) -> Self {
        let (records, lost) = ring.read();
        let mut all = ThreadTrace { name: ring.thread.clone(), lost, ..ThreadTrace::default() };
        // A span that began before the recording was begun in an earlier one.
        for [start, end, meta, of, value] in records.into_iter().filter(|[start, ..]: &[u64; WORDS]| *start >= begun) {
            let (name, rank) = (names::name_of(meta as u32).unwrap_or_default(), rank_of(meta >> 32 & 0xff_ffff));
            match SpanKind::ALL.get((meta >> 56) as usize) {
                Some(&kind) => {
                    let (start, end, of) = (nanoseconds(start), nanoseconds(end), names::name_of(of as u32));
                    all.spans.push(TraceSpan { kind, name, of, rank, start, end, bytes: value });
                }
                None => all.counters.push(TraceCounter { name, source: of, rank, at: nanoseconds(start), value }),
            }
        }
        all
    }
}
