//! The clock of a recording.

use std::{sync::OnceLock, time::Instant};

/// Reads a clock.
pub(super) type ReadClock = fn() -> u64;

/// The clock that the times of a recording are read from.
///
/// Reading the system's clock takes 20 ns on a machine that maps it into processes, and 100 ns elsewhere. A CPU counter
/// is faster; runtimes that can read one offer it.
#[derive(Clone, Copy, Debug, Default)]
pub enum ClockSource {
    /// The system's monotonic clock.
    #[default]
    System,
    /// A monotonic counter with one rate on all cores. The recording measures the rate.
    Counter(fn() -> u64),
}

impl ClockSource {
    /// The function that reads the clock.
    pub(super) fn reader(self) -> ReadClock {
        match self {
            ClockSource::System => system,
            ClockSource::Counter(read) => read,
        }
    }
}

/// The nanoseconds since the first reading in this process.
pub(super) fn system() -> u64 {
    since_origin(Instant::now())
}

fn since_origin(at: Instant) -> u64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    at.saturating_duration_since(*ORIGIN.get_or_init(|| at)).as_nanos() as u64
}

/// One moment on both clocks: the recording's and the system's.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockPair {
    pub ticks: u64,
    pub nanoseconds: u64,
}

impl ClockPair {
    /// A moment before every other.
    pub(super) const ZERO: ClockPair = ClockPair { ticks: 0, nanoseconds: 0 };

    pub(super) fn now(read: ReadClock) -> Self {
        // The ticks belong to the middle of two readings of the system's clock.
        let before = system();
        let ticks = read();
        ClockPair { ticks, nanoseconds: before.midpoint(system()) }
    }
}

/// Converts moments of the system's clock to ticks, with the rate between the start of the recording and now.
pub(super) fn ticks(start: ClockPair, now: ClockPair) -> impl Fn(Instant) -> u64 {
    let nanoseconds = now.nanoseconds.saturating_sub(start.nanoseconds).max(1) as f64;
    let rate = now.ticks.saturating_sub(start.ticks) as f64 / nanoseconds;
    // Moments before the recording started become 0, which excludes them.
    move |at| match since_origin(at).checked_sub(start.nanoseconds) {
        Some(after) => start.ticks + (after as f64 * rate).round() as u64,
        None => 0,
    }
}

/// Converts ticks to nanoseconds since the recording started, with the rate between its start and end.
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
        // The reverse, for moments of the system's clock.
        system();
        let origin = Instant::now();
        let at = |nanoseconds| origin + std::time::Duration::from_nanos(nanoseconds);
        let begun = ClockPair { ticks: 1000, nanoseconds: since_origin(at(50)) };
        let ticks = ticks(begun, ClockPair { ticks: 4000, nanoseconds: since_origin(at(1050)) });
        assert_eq!([49, 50, 550, 1050, 2050].map(|n| ticks(at(n))), [0, 1000, 2500, 4000, 7000]);
        // A recording of zero length.
        assert_eq!(scale(start, start)(1000), 0);
    }
}
