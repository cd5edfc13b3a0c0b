//! Vector clocks (Fidge and Mattern, 1988), which tell the operations of each stream that happen before.

use std::collections::BTreeMap;

/// A vector clock: for each stream, the number of its operations that happen before.
pub(super) type VectorClock = BTreeMap<u64, u64>;

pub(super) fn join(clock: &mut VectorClock, other: &VectorClock) {
    for (stream, time) in other {
        let at = clock.entry(*stream).or_default();
        *at = (*at).max(*time);
    }
}

/// An operation of a stream: `time` is its index there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) stream: u64,
    pub(super) time: u64,
}

impl Moment {
    pub(super) fn seen_by(self, clock: &VectorClock) -> bool {
        clock.get(&self.stream).is_some_and(|t| *t >= self.time)
    }
}
