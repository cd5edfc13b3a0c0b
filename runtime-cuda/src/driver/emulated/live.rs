//! The live memory of an emulated GPU: allocations, and the blocks into which pools cut them.

use std::{
    alloc::{self, Layout},
    cell::Cell,
    collections::BTreeMap,
    slice,
};

use parking_lot::Mutex;
use ptx::{LaunchMemory, MemoryRegion};

/// Host memory that stands for a device's. A kernel may use the block that contains its address, or else the allocation.
#[derive(Default)]
pub(super) struct LiveMemory(Mutex<LiveState>);

#[derive(Default)]
struct LiveState {
    allocations: BTreeMap<u64, Layout>,
    /// The ends of blocks, by their start.
    blocks: BTreeMap<u64, u64>,
}

impl LiveMemory {
    /// Allocates memory filled with NaN, so that a read of uninitialized memory shows.
    pub(super) fn allocate(&self, bytes: usize) -> Option<u64> {
        let layout = Layout::from_size_align(bytes.max(1), 256).ok()?;
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc::alloc(layout) };
        if at.is_null() {
            return None;
        }
        // SAFETY: just allocated with this size.
        unsafe { at.write_bytes(0xff, layout.size()) };
        self.0.lock().allocations.insert(at as u64, layout);
        Some(at as u64)
    }

    pub(super) fn release(&self, at: u64) {
        let mut state = self.0.lock();
        if let Some(layout) = state.allocations.remove(&at) {
            state.forget(at, at + layout.size() as u64);
            // SAFETY: allocated with this layout.
            unsafe { alloc::dealloc(at as *mut u8, layout) };
        }
    }

    /// Notes that a pool uses a range as one block from now on.
    pub(super) fn note_block(&self, at: u64, bytes: usize) {
        let (mut state, end) = (self.0.lock(), at + bytes as u64);
        state.forget(at, end);
        state.blocks.insert(at, end);
    }
}

impl LiveState {
    /// Forgets the blocks that overlap a range.
    fn forget(&mut self, start: u64, end: u64) {
        let overlapping = self.blocks.range(..end).rev().take_while(|(_, block_end)| **block_end > start);
        let starts: Vec<u64> = overlapping.map(|(at, _)| *at).collect();
        for at in starts {
            self.blocks.remove(&at);
        }
    }

    fn range(&self, address: u64) -> Option<(u64, u64)> {
        let block = self.blocks.range(..=address).next_back().map(|(start, end)| (*start, *end));
        let allocation = self.allocations.range(..=address).next_back();
        let allocation = allocation.map(|(start, layout)| (*start, start + layout.size() as u64));
        [block, allocation].into_iter().flatten().find(|(_, end)| address < *end)
    }
}

impl LaunchMemory for LiveMemory {
    fn region(&self, address: u64) -> Option<MemoryRegion<'_>> {
        let (start, end) = self.0.lock().range(address)?;
        // SAFETY: the range is inside of an allocation, whose bytes are initialized. Its owner frees no memory that
        // queued work uses, and lets nothing else use it meanwhile.
        let bytes = unsafe { slice::from_raw_parts(start as *const Cell<u8>, (end - start) as usize) };
        Some(MemoryRegion { start, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_stands_for_its_block() {
        let memory = LiveMemory::default();
        let at = memory.allocate(1024).unwrap();
        let range = |address| memory.region(address).map(|region| (region.start - at, region.bytes.len()));
        assert_eq!((range(at + 1023), range(at + 1024)), (Some((0, 1024)), None));
        memory.note_block(at, 256);
        memory.note_block(at + 256, 768);
        assert_eq!((range(at + 255), range(at + 256)), (Some((0, 256)), Some((256, 768))));
        // The blocks are merged.
        memory.note_block(at, 512);
        assert_eq!((range(at + 300), range(at + 600)), (Some((0, 512)), Some((0, 1024))));
        memory.release(at);
        assert_eq!(range(at), None);
    }
}
