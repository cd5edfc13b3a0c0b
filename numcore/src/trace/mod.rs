//! What happened when: spans and counters of a real run, recorded by whoever does something.
//!
//! This crate records op calls and memory, a runtime its kernels, a communicator its collectives, a loader what was waited for. While
//! nothing is recorded, [`span`] is one relaxed load of a static. While something is, a span costs two readings of the clock and five
//! stores into a ring that belongs to its thread: no lock, no allocation but for a thread's first span and for a name's first use.
//!
//! ```
//! use numcore::trace::{Detail, Recording, RecordingOptions, SpanKind, span};
//! # fn main() -> numcore::Result<()> {
//! let recording = Recording::start(RecordingOptions { detail: Detail::Steps, ..Default::default() })?;
//! {
//!     let _span = span(SpanKind::Phase, "forward"); // until it is dropped
//! }
//! let trace = recording.stop();
//! assert_eq!(&*trace.threads[0].spans[0].name, "forward");
//! # Ok(())
//! # }
//! ```
//!
//! **Invariant**: a recording changes no result. It is the only state of this crate that a whole process shares.

mod clock;
mod local;
mod names;
mod recording;
mod ring;

use std::{
    sync::atomic::{AtomicU8, Ordering},
    time::Instant,
};

pub use clock::ClockSource;
pub use local::{rank, set_rank};
pub use recording::{Recording, RecordingOptions, ThreadTrace, Trace, TraceCounter, TraceSpan};

/// What is recorded now: 0 for nothing, otherwise a [`Detail`].
static LEVEL: AtomicU8 = AtomicU8::new(0);

/// How much is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Detail {
    /// Phases of steps, collectives, waits: some hundred spans a step.
    Steps = 1,
    /// In addition every op call, every kernel and every change of memory.
    #[default]
    Operations = 2,
}

/// What a span is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum SpanKind {
    /// A part of a step: forward, backward, update, an action of a pipeline.
    Phase,
    /// Data that was waited for, or made.
    Data,
    /// A collective, from its start to its end; others overlap it.
    Collective,
    /// The host waited for a collective.
    Wait,
    /// An op call, as the host sees it.
    Op,
    /// A kernel, where the runtime knows when it ran.
    Kernel,
}

impl SpanKind {
    /// All kinds, in declaration order.
    pub const ALL: [SpanKind; 6] =
        [SpanKind::Phase, SpanKind::Data, SpanKind::Collective, SpanKind::Wait, SpanKind::Op, SpanKind::Kernel];

    /// The kind's name in files.
    pub fn name(self) -> &'static str {
        match self {
            SpanKind::Phase => "phase",
            SpanKind::Data => "data",
            SpanKind::Collective => "collective",
            SpanKind::Wait => "wait",
            SpanKind::Op => "op",
            SpanKind::Kernel => "kernel",
        }
    }

    fn detail(self) -> Detail {
        if matches!(self, SpanKind::Op | SpanKind::Kernel) { Detail::Operations } else { Detail::Steps }
    }
}

/// Whether spans of a kind are recorded now.
#[inline]
pub fn is_recorded(kind: SpanKind) -> bool {
    LEVEL.load(Ordering::Relaxed) >= kind.detail() as u8
}

/// A span that began, and ends when it is dropped.
#[must_use = "a span ends when it is dropped: bind it to a name"]
#[derive(Debug)]
pub struct SpanGuard(Option<Begun>);

#[derive(Debug)]
struct Begun {
    kind: SpanKind,
    name: &'static str,
    of: u32,
    start: Moment,
}

/// A moment of the clock of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(u64);

/// Begins a span on this thread.
#[inline]
pub fn span(kind: SpanKind, name: &'static str) -> SpanGuard {
    if !is_recorded(kind) {
        return SpanGuard(None);
    }
    SpanGuard(Some(Begun { kind, name, of: names::NONE, start: now() }))
}

/// Begins a span that is of something: a collective's bucket, a unit of parameters.
#[inline]
pub fn span_of(kind: SpanKind, name: &'static str, of: Option<&str>) -> SpanGuard {
    if !is_recorded(kind) {
        return SpanGuard(None);
    }
    let of = of.map_or(names::NONE, names::intern);
    SpanGuard(Some(Begun { kind, name, of, start: now() }))
}

impl Drop for SpanGuard {
    #[inline]
    fn drop(&mut self) {
        if let Some(Begun { kind, name, of, start }) = self.0.take() {
            local::push_span(kind, name, of, start.0, 0);
        }
    }
}

/// The present moment, for a span that is recorded by [`ended`] when it is over.
pub fn now() -> Moment {
    Moment(local::now())
}

/// Records a span that began at `start`, perhaps on another thread, and ends now. `bytes` is what it moved.
pub fn ended(kind: SpanKind, name: &'static str, of: Option<&str>, start: Moment, bytes: u64) {
    if is_recorded(kind) {
        local::push_span(kind, name, of.map_or(names::NONE, names::intern), start.0, bytes);
    }
}

/// Records a span of a device, whose runtime has measured it. It is shown with the thread that calls this, which is to record nothing else.
pub fn measured(kind: SpanKind, name: &'static str, of: Option<&str>, start: Instant, end: Instant) {
    if is_recorded(kind) {
        local::push_measured(kind, name, of.map_or(names::NONE, names::intern), start, end);
    }
}

/// The number of the recording in which changes of memory are recorded now, if there is one.
#[inline]
pub(crate) fn counted_in() -> Option<u64> {
    (LEVEL.load(Ordering::Relaxed) >= Detail::Operations as u8).then(recording::number)
}

/// Records a value that changed, where [`counted_in`] has said that such are recorded. Counters of one name and different sources are
/// added up: memory pools for one.
pub(crate) fn counter(name: &'static str, source: u32, value: u64) {
    local::push_counter(name, source, value);
}

/// Records a value that was looked at, such as how busy a device is.
pub fn sample(name: &'static str, value: u64) {
    if LEVEL.load(Ordering::Relaxed) >= Detail::Steps as u8 {
        local::push_counter(name, 0, value);
    }
}
