//! Vector clocks (Fidge and Mattern, 1988), which tell the operations of each stream that happen before.

use std::collections::BTreeMap;

/// A vector clock: for each stream, the number of its operations that happen before.
pub(crate) type VectorClock = BTreeMap<u64, u64>;

pub(crate) fn join(clock: &mut VectorClock, other: &VectorClock) {
    for (stream, time) in other {
        let at = clock.entry(*stream).or_default();
        *at = (*at).max(*time);
    }
}

/// An operation of a stream: `time` is its index there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) stream: u64,
    pub(crate) time: u64,
}

impl Moment {
    pub(crate) fn seen_by(self, clock: &VectorClock) -> bool {
        clock.get(&self.stream).is_some_and(|t| *t >= self.time)
    }
}
