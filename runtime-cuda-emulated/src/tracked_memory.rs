//! The memory that a race detector watches: the last accesses to each part of it.
//!
//! A pool cuts allocations into blocks and merges them again. A pointer stands for the block that contains it. The
//! history of a range stays with it when its block is cut or merged, since it reveals a block that is reused too early.

use std::{collections::BTreeMap, ops::Range};

use crate::{
    tracked_block::{Access, TrackedBlock},
    vector_clock::{Moment, VectorClock},
};

/// Allocations, their blocks, and the history of each part.
#[derive(Default)]
pub(crate) struct TrackedMemory {
    /// The ends of allocations, by their start.
    allocations: BTreeMap<u64, u64>,
    /// The ends of the pools' blocks, by their start.
    blocks: BTreeMap<u64, u64>,
    /// Parts with one history each; those of an allocation cover it.
    parts: BTreeMap<u64, TrackedBlock>,
}

impl TrackedMemory {
    pub(crate) fn allocated(&mut self, address: u64, bytes: usize) {
        self.allocations.insert(address, address + bytes as u64);
        self.parts.insert(address, TrackedBlock { bytes, written: None, read: Vec::new() });
    }

    /// Forgets an allocation that was freed.
    pub(crate) fn freed(&mut self, address: u64) {
        let Some(end) = self.allocations.remove(&address) else { return };
        self.blocks.retain(|start, _| !(address..end).contains(start));
        self.parts.retain(|start, _| !(address..end).contains(start));
    }

    /// The range of the allocation at `address`.
    pub(crate) fn allocation(&self, address: u64) -> Option<Range<u64>> {
        self.allocations.get(&address).map(|end| address..*end)
    }

    /// Notes that a pool uses this range as one block from now on.
    pub(crate) fn cut(&mut self, block: Range<u64>) {
        self.blocks.retain(|start, end| *end <= block.start || *start >= block.end);
        self.blocks.insert(block.start, block.end);
        self.split(block.start);
        self.split(block.end);
    }

    /// The range that a pointer stands for: its block, or else its allocation; `None` for the address of empty memory.
    pub(crate) fn range_of(&self, address: u64) -> Option<Range<u64>> {
        let within = |all: &BTreeMap<u64, u64>| {
            let (start, end) = all.range(..=address).next_back()?;
            (address < *end).then_some(*start..*end)
        };
        within(&self.blocks).or_else(|| within(&self.allocations))
    }

    /// Describes the first earlier access that must happen before an access of `range` and does not.
    pub(crate) fn conflicts(&self, range: &Range<u64>, clock: &VectorClock, how: Access) -> Option<String> {
        self.parts.range(range.clone()).find_map(|(_, part)| part.conflicts(clock, how))
    }

    pub(crate) fn note(&mut self, range: &Range<u64>, moment: Moment, what: &'static str, how: Access) {
        for (_, part) in self.parts.range_mut(range.clone()) {
            match how {
                Access::Read => {
                    // A stream that is ordered after the last read of another is ordered after the earlier ones.
                    part.read.retain(|(before, _)| before.stream != moment.stream);
                    part.read.push((moment, what));
                }
                Access::Write => (part.written, part.read) = (Some((moment, what)), Vec::new()),
            }
        }
    }

    /// Splits the part that contains an address at it.
    fn split(&mut self, at: u64) {
        let Some((start, part)) = self.parts.range_mut(..at).next_back() else { return };
        let end = start + part.bytes as u64;
        if at < end {
            part.bytes = (at - start) as usize;
            let rest = TrackedBlock { bytes: (end - at) as usize, ..part.clone() };
            self.parts.insert(at, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_range_stays_with_it() {
        let mut memory = TrackedMemory::default();
        memory.allocated(1000, 100);
        memory.cut(1000..1040);
        memory.cut(1040..1100);
        let first = Moment { stream: 1, time: 1 };
        memory.note(&memory.range_of(1010).unwrap(), first, "a kernel", Access::Write);
        let nothing = VectorClock::new();
        assert!(memory.conflicts(&memory.range_of(1040).unwrap(), &nothing, Access::Write).is_none());
        // The blocks are merged, then cut elsewhere.
        memory.cut(1000..1100);
        assert_eq!(memory.range_of(1099), Some(1000..1100));
        memory.cut(1020..1100);
        assert!(memory.conflicts(&(1020..1100), &nothing, Access::Read).is_some());
        memory.cut(1050..1100);
        assert!(memory.conflicts(&(1050..1100), &nothing, Access::Read).is_none());
        memory.freed(1000);
        assert_eq!(memory.range_of(1060), None);
    }
}
