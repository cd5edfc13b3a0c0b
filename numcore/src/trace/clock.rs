//! The clock of a recording.

use std::{sync::OnceLock, time::Instant};

/// Reads a clock.
pub(super) type ReadClock = fn() -> u64;

/// Where the moments of a recording come from.
///
/// Reading the system's clock takes 20 ns on a machine that maps it into processes, and 100 where it does not. A counter of the CPU takes
/// less; a runtime that may read one offers it.
#[derive(Clone, Copy, Debug, Default)]
pub enum ClockSource {
    /// The system's monotonic clock.
    #[default]
    System,
    /// A counter that only grows, at one rate on all cores. The recording measures the rate.
    Counter(fn() -> u64),
}

impl ClockSource {
    /// The function that reads it.
    pub(super) fn reader(self) -> ReadClock {
        match self {
            ClockSource::System => system,
            ClockSource::Counter(read) => read,
        }
    }
}

/// Nanoseconds since the first reading in this process.
pub(super) fn system() -> u64 {
    since_origin(Instant::now())
}

fn since_origin(at: Instant) -> u64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    at.saturating_duration_since(*ORIGIN.get_or_init(|| at)).as_nanos() as u64
}

/// A moment on the clock of a recording, and on the system's.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockPair {
    pub ticks: u64,
    pub nanoseconds: u64,
}

impl ClockPair {
    /// Before everything.
    pub const ZERO: ClockPair = ClockPair { ticks: 0, nanoseconds: 0 };

    pub fn now(read: ReadClock) -> Self {
        // The counter is read between two readings of the system's clock, and belongs to their middle.
        let before = system();
        let ticks = read();
        ClockPair { ticks, nanoseconds: before.midpoint(system()) }
    }
}

/// Moments of the system's clock as ticks, by the beginning of a recording and the present.
pub(super) fn ticks(start: ClockPair, now: ClockPair) -> impl Fn(Instant) -> u64 {
    let nanoseconds = now.nanoseconds.saturating_sub(start.nanoseconds).max(1) as f64;
    let rate = now.ticks.saturating_sub(start.ticks) as f64 / nanoseconds;
    // What was before the recording is no part of it.
    move |at| match since_origin(at).checked_sub(start.nanoseconds) {
        Some(after) => start.ticks + (after as f64 * rate).round() as u64,
        None => 0,
    }
}

/// Ticks as nanoseconds since a recording began, by its two ends.
pub(super) fn scale(start: ClockPair, end: ClockPair) -> impl Fn(u64) -> u64 {
    let ticks = end.ticks.saturating_sub(start.ticks).max(1) as f64;
    let rate = (end.nanoseconds - start.nanoseconds) as f64 / ticks;
    move |at| (at.saturating_sub(start.ticks) as f64 * rate).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_scaled_by_both_ends() {
        let (start, end) = (ClockPair { ticks: 1000, nanoseconds: 50 }, ClockPair { ticks: 4000, nanoseconds: 1050 });
        let nanoseconds = scale(start, end);
        assert_eq!([999, 1000, 2500, 4000].map(nanoseconds), [0, 0, 500, 1000]);
        // And back, of moments of the system's clock.
        system();
        let origin = Instant::now();
        let at = |nanoseconds| origin + std::time::Duration::from_nanos(nanoseconds);
        let begun = ClockPair { ticks: 1000, nanoseconds: since_origin(at(50)) };
        let ticks = ticks(begun, ClockPair { ticks: 4000, nanoseconds: since_origin(at(1050)) });
        assert_eq!([49, 50, 550, 1050, 2050].map(|n| ticks(at(n))), [0, 1000, 2500, 4000, 7000]);
        // A recording that ended at once.
        assert_eq!(scale(start, start)(1000), 0);
    }
}
