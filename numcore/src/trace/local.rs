//! The state of a recording in each thread: its ring, its clock, its rank.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
    time::Instant,
};

use super::{
    SpanKind,
    clock::{self, ClockPair, ReadClock},
    names::NameCache,
    recording::{self, COUNTER},
    ring::Ring,
};

/// The rank of a thread for which `set_rank` was not called.
pub(super) const NO_RANK: u64 = (1 << 24) - 1;

thread_local! {
    static LOCAL: RefCell<Local> = const { RefCell::new(Local { recording: 0, ring: None, read: clock::system, start: ClockPair::ZERO, names: NameCache::new() }) };
    static RANK: Cell<u64> = const { Cell::new(NO_RANK) };
}

struct Local {
    /// The number of the recording that the ring belongs to.
    recording: u64,
    ring: Option<Arc<Ring>>,
    read: ReadClock,
    /// The moment at which the recording started.
    start: ClockPair,
    names: NameCache,
}

/// Sets the rank that this thread works for; its spans and counters are recorded with it.
pub fn set_rank(rank: usize) {
    RANK.set((rank as u64).min(NO_RANK));
}

/// The rank that this thread works for, if it was set. Threads that it starts on the rank's behalf should set it, too.
pub fn rank() -> Option<usize> {
    rank_of(RANK.get())
}

pub(super) fn rank_of(rank: u64) -> Option<usize> {
    (rank != NO_RANK).then_some(rank as usize)
}

/// The current time on the recording's clock, in ticks.
#[inline]
pub(super) fn now() -> u64 {
    LOCAL.with_borrow_mut(|local| {
        local.join();
        (local.read)()
    })
}

#[inline]
pub(super) fn push_span(kind: SpanKind, name: &'static str, of: u32, start: u64, bytes: u64) {
    LOCAL.with_borrow_mut(|local| {
        local.join();
        let (end, name) = ((local.read)(), local.names.number(name));
        local.push([start, end, meta(kind as u64, name), u64::from(of), bytes]);
    });
}

/// Records a span whose start and end were measured elsewhere, on the system's clock.
pub(super) fn push_measured(kind: SpanKind, name: &'static str, of: u32, start: Instant, end: Instant) {
    LOCAL.with_borrow_mut(|local| {
        local.join();
        let ticks = clock::ticks(local.start, ClockPair::now(local.read));
        let name = local.names.number(name);
        local.push([ticks(start), ticks(end), meta(kind as u64, name), u64::from(of), 0]);
    });
}

#[inline]
pub(super) fn push_counter(name: &'static str, source: u32, value: u64) {
    // Buffers may be freed while a thread ends, after its thread-local state was destroyed.
    let _ = LOCAL.try_with(|local| {
        let mut local = local.borrow_mut();
        local.join();
        let (now, name) = ((local.read)(), local.names.number(name));
        local.push([now, now, meta(COUNTER, name), u64::from(source), value]);
    });
}

fn meta(kind: u64, name: u32) -> u64 {
    kind << 56 | RANK.get() << 32 | u64::from(name)
}

impl Local {
    /// Joins the current recording, if this thread has not yet.
    #[inline]
    fn join(&mut self) {
        let present = recording::number();
        if self.recording != present {
            self.join_anew(present);
        }
    }

    #[cold]
    fn join_anew(&mut self, present: u64) {
        self.recording = present;
        let joined = recording::join();
        let unread: (ReadClock, ClockPair) = (clock::system, ClockPair::ZERO);
        (self.read, self.start) = joined.as_ref().map_or(unread, |&(_, read, start)| (read, start));
        self.ring = joined.map(|(ring, ..)| ring);
    }

    #[inline]
    fn push(&self, record: [u64; 5]) {
        if let Some(ring) = &self.ring {
            ring.push(record);
        }
    }
}
