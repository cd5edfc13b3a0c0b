//! [`Recording`]: its start and end, and the resulting `Trace`.

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

/// The kind that marks a record as a counter.
pub(super) const COUNTER: u64 = 0xff;

/// The number of the current recording in this process; a thread compares it with the number of its ring.
static NUMBER: AtomicU64 = AtomicU64::new(0);
static ACTIVE: Mutex<Option<Active>> = Mutex::new(None);

struct Active {
    start: ClockPair,
    options: RecordingOptions,
    rings: Vec<Arc<Ring>>,
}

/// Options of a recording: its detail, its memory and its clock.
#[derive(Clone, Copy, Debug)]
pub struct RecordingOptions {
    /// The level of detail; by default all.
    pub detail: Detail,
    /// The number of spans and counters kept per thread, the most recent ones, at 40 bytes each; by default 65 536.
    pub per_thread: usize,
    /// The clock; by default the system's.
    pub clock: ClockSource,
}

impl Default for RecordingOptions {
    fn default() -> Self {
        RecordingOptions { detail: Detail::default(), per_thread: 1 << 16, clock: ClockSource::default() }
    }
}

/// An active recording of all threads of this process. It ends when it is [stopped](Recording::stop) or dropped.
#[derive(Debug)]
#[must_use = "a recording ends when it is dropped"]
pub struct Recording {
    start: ClockPair,
    read: ReadClock,
}

impl Recording {
    /// Starts a recording.
    ///
    /// # Errors
    /// Fails if another recording is active: a process has one at a time.
    pub fn start(options: RecordingOptions) -> Result<Self> {
        let mut active = lock();
        if active.is_some() {
            return Err(Error::usage("Recording::start", "something is recorded already; stop that recording first"));
        }
        let read = options.clock.reader();
        let start = ClockPair::now(read);
        *active = Some(Active { start, options, rings: Vec::new() });
        NUMBER.fetch_add(1, Ordering::Relaxed);
        LEVEL.store(options.detail as u8, Ordering::Relaxed);
        Ok(Recording { start, read })
    }

    /// Ends the recording. Spans that have not ended are left out.
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
        // Threads see that their ring belongs to another recording.
        NUMBER.fetch_add(1, Ordering::Relaxed);
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<Active>> {
    ACTIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of the current recording; each recording has another one.
#[inline]
pub(super) fn number() -> u64 {
    NUMBER.load(Ordering::Relaxed)
}

/// A new ring for this thread in the current recording, with its clock and start; `None` if no recording is active.
pub(super) fn join() -> Option<(Arc<Ring>, ReadClock, ClockPair)> {
    let mut active = lock();
    let active = active.as_mut()?;
    let thread = thread::current();
    let name = thread.name().map_or_else(|| format!("{:?}", thread.id()), String::from);
    let ring = Arc::new(Ring::new(name, active.options.per_thread));
    active.rings.push(Arc::clone(&ring));
    Some((ring, active.options.clock.reader(), active.start))
}

/// The result of a recording.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Threads in the order of their first span.
    pub threads: Vec<ThreadTrace>,
    /// The duration of the recording, in nanoseconds.
    pub length: u64,
}

/// The spans and counters of one thread.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ThreadTrace {
    /// The thread's name, or its id if it has none.
    pub name: String,
    /// Spans in the order in which they ended.
    pub spans: Vec<TraceSpan>,
    /// Counters in the order in which they changed.
    pub counters: Vec<TraceCounter>,
    /// The number of spans and counters that were overwritten, the oldest ones.
    pub lost: u64,
}

/// A span that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSpan {
    /// The kind of activity.
    pub kind: SpanKind,
    /// The name of the operation.
    pub name: Arc<str>,
    /// The name of its object, if it has one: a bucket, a unit.
    pub of: Option<Arc<str>>,
    /// The rank that the thread worked for, if it was set.
    pub rank: Option<usize>,
    /// The start, in nanoseconds since the start of the recording.
    pub start: u64,
    /// The end, in nanoseconds since the start of the recording.
    pub end: u64,
    /// The number of bytes it moved; 0 if unknown.
    pub bytes: u64,
}

/// A change of a recorded value.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceCounter {
    /// The counter's name.
    pub name: Arc<str>,
    /// The source of this value, among several with this name.
    pub source: u64,
    /// The rank that the thread worked for, if it was set.
    pub rank: Option<usize>,
    /// The time of the change, in nanoseconds since the start of the recording.
    pub at: u64,
    /// The new value.
    pub value: u64,
}

impl ThreadTrace {
    fn of(ring: &Ring, begun: u64, nanoseconds: &impl Fn(u64) -> u64) -> Self {
        let (records, lost) = ring.read();
        let mut all = ThreadTrace { name: ring.thread.clone(), lost, ..ThreadTrace::default() };
        // A span that began before this recording belongs to an earlier one.
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
