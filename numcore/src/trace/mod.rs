//! Tracing: spans and counters of a real run, recorded by the code that does the work.
//!
//! This crate records op calls and memory; runtimes record kernels, communicators collectives, and loaders waiting
//! times. While no recording is active, [`span`] is one relaxed load of a static. During a recording, a span costs two
//! clock readings and five stores into a ring of its own thread. It takes no lock and allocates nothing, except for a
//! thread's first span and a name's first use.
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
//! **Invariant**: a recording changes no result. Besides caches and ids, no other state of this crate is process-wide.

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

/// The current level of detail: 0 for no recording, otherwise a [`Detail`].
static LEVEL: AtomicU8 = AtomicU8::new(0);

/// The level of detail of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Detail {
    /// Phases of steps, collectives and waits: some hundred spans per step.
    Steps = 1,
    /// Additionally every op call, every kernel and every change of memory.
    #[default]
    Operations = 2,
}

/// The kind of activity that a span covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum SpanKind {
    /// A part of a step: forward, backward, update, an action of a pipeline.
    Phase,
    /// Waiting for data, or producing it.
    Data,
    /// A collective, from its start to its end; it may overlap other spans.
    Collective,
    /// Waiting of the host for a collective.
    Wait,
    /// An op call, as timed on the host.
    Op,
    /// A kernel, if the runtime can measure its start and end.
    Kernel,
}

impl SpanKind {
    /// All kinds, in declaration order.
    pub const ALL: [SpanKind; 6] =
        [SpanKind::Phase, SpanKind::Data, SpanKind::Collective, SpanKind::Wait, SpanKind::Op, SpanKind::Kernel];

    /// The kind's name in trace files.
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

/// Tells whether spans of this kind are recorded now.
#[inline]
pub fn is_recorded(kind: SpanKind) -> bool {
    LEVEL.load(Ordering::Relaxed) >= kind.detail() as u8
}

/// A span in progress, which ends when it is dropped.
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

/// A moment on the clock of a recording.
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

/// Begins a span with the name of its object, such as a collective's bucket or a unit of parameters.
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

/// The current moment, as the start of a span that [`ended`] records later.
pub fn now() -> Moment {
    Moment(local::now())
}

/// Records a span from `start`, perhaps on another thread, to now. `bytes` is the number of bytes it moved.
pub fn ended(kind: SpanKind, name: &'static str, of: Option<&str>, start: Moment, bytes: u64) {
    if is_recorded(kind) {
        local::push_span(kind, name, of.map_or(names::NONE, names::intern), start.0, bytes);
    }
}

/// Records a span that a device's runtime measured. It is shown with the calling thread, which should record nothing
/// else.
pub fn measured(kind: SpanKind, name: &'static str, of: Option<&str>, start: Instant, end: Instant) {
    if is_recorded(kind) {
        local::push_measured(kind, name, of.map_or(names::NONE, names::intern), start, end);
    }
}

/// The number of the recording that records changes of memory now, if there is one.
#[inline]
pub(crate) fn counted_in() -> Option<u64> {
    (LEVEL.load(Ordering::Relaxed) >= Detail::Operations as u8).then(recording::number)
}

/// Records a changed value, for callers that [`counted_in`] returned a recording to. Counters of one name and different
/// sources, such as memory pools, are added up.
pub(crate) fn counter(name: &'static str, source: u32, value: u64) {
    local::push_counter(name, source, value);
}

/// Records a sampled value, such as the utilization of a device.
pub fn sample(name: &'static str, value: u64) {
    if LEVEL.load(Ordering::Relaxed) >= Detail::Steps as u8 {
        local::push_counter(name, 0, value);
    }
}
