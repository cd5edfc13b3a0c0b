//! The live memory of an emulated GPU: allocations, and the blocks into which pools cut them.

use std::{
    alloc::{self, Layout},
    cell::Cell,
    collections::BTreeMap,
    slice,
    sync::Arc,
};

use parking_lot::Mutex;
use ptx::{LaunchMemory, MemoryRegion};

/// The ends of the blocks into which pools cut allocations, by their start.
pub(crate) type Blocks = BTreeMap<u64, u64>;

/// Host memory that stands for a device's.
#[derive(Default)]
pub(crate) struct LiveMemory(Mutex<LiveState>);

#[derive(Default)]
struct LiveState {
    allocations: BTreeMap<u64, Layout>,
    blocks: Arc<Blocks>,
}

impl LiveMemory {
    /// Allocates memory filled with NaN, so that a read of uninitialized memory shows.
    pub(crate) fn allocate(&self, bytes: usize) -> Option<u64> {
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

    pub(crate) fn release(&self, at: u64) {
        let mut state = self.0.lock();
        if let Some(layout) = state.allocations.remove(&at) {
            state.forget(at, at + layout.size() as u64);
            // SAFETY: allocated with this layout.
            unsafe { alloc::dealloc(at as *mut u8, layout) };
        }
    }

    /// Notes that a pool uses a range as one block from now on.
    pub(crate) fn note_block(&self, at: u64, bytes: usize) {
        let (mut state, end) = (self.0.lock(), at + bytes as u64);
        state.forget(at, end);
        Arc::make_mut(&mut state.blocks).insert(at, end);
    }

    /// The blocks as they are now.
    pub(crate) fn blocks(&self) -> Arc<Blocks> {
        self.0.lock().blocks.clone()
    }

    /// Tells whether a range is inside of one allocation.
    pub(crate) fn holds(&self, at: u64, bytes: usize) -> bool {
        self.0.lock().allocation(at).is_some_and(|(_, end)| at + bytes as u64 <= end)
    }

    /// The memory as a kernel sees it that was queued while there were these blocks.
    pub(crate) fn with<'a>(&'a self, blocks: &'a Blocks) -> QueuedMemory<'a> {
        QueuedMemory { live: self, blocks }
    }
}

impl LiveState {
    /// Forgets the blocks that overlap a range.
    fn forget(&mut self, start: u64, end: u64) {
        let overlapping = self.blocks.range(..end).rev().take_while(|(_, block_end)| **block_end > start);
        let starts: Vec<u64> = overlapping.map(|(at, _)| *at).collect();
        for at in starts {
            Arc::make_mut(&mut self.blocks).remove(&at);
        }
    }

    /// The start and the end of the allocation that contains an address.
    fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (start, layout) = self.allocations.range(..=address).next_back()?;
        let end = start + layout.size() as u64;
        (address < end).then_some((*start, end))
    }
}

/// Memory as queued work sees it: it may use the block that contains its address, or else the allocation.
pub(crate) struct QueuedMemory<'a> {
    live: &'a LiveMemory,
    blocks: &'a Blocks,
}

impl LaunchMemory for QueuedMemory<'_> {
    fn region(&self, address: u64) -> Option<MemoryRegion<'_>> {
        let allocation = self.live.0.lock().allocation(address)?;
        let block = self.blocks.range(..=address).next_back().filter(|(_, end)| address < **end);
        let (start, end) = block.map_or(allocation, |(start, end)| (*start, *end));
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
        let range = |address| {
            let blocks = memory.blocks();
            memory.with(&blocks).region(address).map(|region| (region.start - at, region.bytes.len()))
        };
        assert_eq!((range(at + 1023), range(at + 1024)), (Some((0, 1024)), None));
        memory.note_block(at, 256);
        memory.note_block(at + 256, 768);
        assert_eq!((range(at + 255), range(at + 256)), (Some((0, 256)), Some((256, 768))));
        // The blocks are merged.
        memory.note_block(at, 512);
        assert_eq!((range(at + 300), range(at + 600)), (Some((0, 512)), Some((0, 1024))));
        // Work that was queued before has the blocks of then.
        let before = memory.blocks();
        memory.note_block(at, 128);
        assert_eq!(memory.with(&before).region(at + 300).map(|region| region.bytes.len()), Some(512));
        assert!(memory.holds(at + 1000, 24) && !memory.holds(at + 1000, 25));
        memory.release(at);
        assert_eq!((range(at), memory.with(&before).region(at + 300).is_some()), (None, false));
    }
}
