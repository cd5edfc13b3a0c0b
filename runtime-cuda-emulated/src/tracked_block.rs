//! The history of a part of memory: its last write and the reads since.

use crate::vector_clock::{Moment, VectorClock};

/// The kind of a memory access.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// A part of an allocation, of the device or of the host, with its last write and the reads since.
#[derive(Clone)]
pub(crate) struct TrackedBlock {
    pub(crate) bytes: usize,
    pub(crate) written: Option<(Moment, &'static str)>,
    pub(crate) read: Vec<(Moment, &'static str)>,
}

impl TrackedBlock {
    /// Describes an earlier access that must happen before this one and does not; `None` if all are ordered.
    pub(crate) fn conflicts(&self, clock: &VectorClock, how: Access) -> Option<String> {
        let readers = if how == Access::Write { self.read.as_slice() } else { &[] };
        let before = self.written.iter().map(|w| (w, Access::Write)).chain(readers.iter().map(|r| (r, Access::Read)));
        let mut unseen = before.filter(|((moment, _), _)| !moment.seen_by(clock));
        unseen.next().map(|((moment, what), how)| format!("{what} ({how:?}, stream {})", moment.stream))
    }
}
