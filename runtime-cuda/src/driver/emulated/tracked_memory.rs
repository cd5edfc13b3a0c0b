//! The memory that a race detector watches: who has read and written each part of it.
//!
//! A pool cuts allocations into blocks and merges them again. A pointer means the block that it is in; what is known of a range stays with it
//! when its block is cut or merged, since that is how a block that is reused too early shows.

use std::{collections::BTreeMap, ops::Range};

use super::{
    tracked_block::{Access, TrackedBlock},
    vector_clock::{Moment, VectorClock},
};

/// Allocations, their blocks, and what is known of each part.
#[derive(Default)]
pub(super) struct TrackedMemory {
    /// Where allocations end, by where they start.
    allocations: BTreeMap<u64, u64>,
    /// Where the blocks of pools end.
    blocks: BTreeMap<u64, u64>,
    /// Parts with one history each; those of an allocation cover it.
    parts: BTreeMap<u64, TrackedBlock>,
}

impl TrackedMemory {
    pub(super) fn allocated(&mut self, address: u64, bytes: usize) {
        self.allocations.insert(address, address + bytes as u64);
        self.parts.insert(address, TrackedBlock { bytes, written: None, read: Vec::new() });
    }

    /// An allocation is gone.
    pub(super) fn freed(&mut self, address: u64) {
        let Some(end) = self.allocations.remove(&address) else { return };
        self.blocks.retain(|start, _| !(address..end).contains(start));
        self.parts.retain(|start, _| !(address..end).contains(start));
    }

    /// The whole of an allocation.
    pub(super) fn allocation(&self, address: u64) -> Option<Range<u64>> {
        self.allocations.get(&address).map(|end| address..*end)
    }

    /// A pool uses this range as one block from now on.
    pub(super) fn cut(&mut self, block: Range<u64>) {
        self.blocks.retain(|start, end| *end <= block.start || *start >= block.end);
        self.blocks.insert(block.start, block.end);
        self.split(block.start);
        self.split(block.end);
    }

    /// What a pointer means: its block, or else its allocation; nothing where memory of no bytes is said to be.
    pub(super) fn range_of(&self, address: u64) -> Option<Range<u64>> {
        let within = |all: &BTreeMap<u64, u64>| {
            let (start, end) = all.range(..=address).next_back()?;
            (address < *end).then_some(*start..*end)
        };
        within(&self.blocks).or_else(|| within(&self.allocations))
    }

    /// The first access that an access of a range would have to come after, and does not.
    pub(super) fn conflicts(&self, range: &Range<u64>, clock: &VectorClock, how: Access) -> Option<String> {
        self.parts.range(range.clone()).find_map(|(_, part)| part.conflicts(clock, how))
    }

    pub(super) fn note(&mut self, range: &Range<u64>, moment: Moment, what: &'static str, how: Access) {
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

    /// Makes two parts of the one that holds an address.
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
        // Merged, then cut elsewhere.
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
