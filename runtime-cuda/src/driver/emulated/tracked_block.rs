//! Who has read and written a part of memory.

use super::vector_clock::{Moment, VectorClock};

/// How memory is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Access {
    Read,
    Write,
}

/// A part of an allocation, of the device or of the host.
#[derive(Clone)]
pub(super) struct TrackedBlock {
    pub(super) bytes: usize,
    pub(super) written: Option<(Moment, &'static str)>,
    pub(super) read: Vec<(Moment, &'static str)>,
}

impl TrackedBlock {
    /// What an access would have to come after, and does not.
    pub(super) fn conflicts(&self, clock: &VectorClock, how: Access) -> Option<String> {
        let readers = if how == Access::Write { self.read.as_slice() } else { &[] };
        let before = self.written.iter().map(|w| (w, Access::Write)).chain(readers.iter().map(|r| (r, Access::Read)));
        let mut unseen = before.filter(|((moment, _), _)| !moment.seen_by(clock));
        unseen.next().map(|((moment, what), how)| format!("{what} ({how:?}, stream {})", moment.stream))
    }
}
