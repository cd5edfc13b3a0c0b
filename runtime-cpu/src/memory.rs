//! Memory: one pool per queue. Freed blocks are kept by size class and handed out again, so a training step in its steady
//! state asks the system for nothing.

use std::{
    alloc::{self, Layout},
    fmt,
    ptr::NonNull,
    sync::Arc,
};

use numcore::{DeviceId, DeviceKind, ErrorKind, MemoryStats, Result, Use};
use parking_lot::Mutex;

/// Every block starts at a multiple of this: what SIMD, and other runtimes' binding offsets, want.
const ALIGN: usize = 256;
/// Blocks from this size on start at a multiple of it, and ask for pages of that size.
const HUGE: usize = 2 << 20;
/// Size classes between one power of two and the next: at most an eighth of a block is waste.
const STEPS: usize = 8;
const CLASSES: usize = STEPS * usize::BITS as usize;
/// How many classes above its own a request may take a free block from.
const SLACK: usize = 2;

/// A queue's memory: free blocks and the account.
pub(crate) struct Memory(Mutex<State>);

struct State {
    free: Vec<Vec<Block>>,
    stats: MemoryStats,
}

#[derive(Clone, Copy)]
struct Block {
    start: NonNull<u8>,
    class: usize,
}

// SAFETY: a block is owned by whoever holds it: the free list or one buffer.
unsafe impl Send for Block {}

/// A piece of memory; it returns to its queue's pool on drop.
pub struct Buffer {
    block: Option<Block>,
    bytes: usize,
    use_: Use,
    memory: Arc<Memory>,
}

// SAFETY: a `Buffer` gives out a raw pointer only inside this crate; kernels write through it under the contract of
// `numcore::Runtime` (an output is seen by nothing else meanwhile), and read otherwise.
unsafe impl Sync for Buffer {}
// SAFETY: as above; a block is not tied to the thread that allocated it.
unsafe impl Send for Buffer {}

impl Buffer {
    /// The first byte. Writing is up to the contract of `numcore::Runtime`.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.block.map_or(std::ptr::without_provenance_mut(ALIGN), |b| b.start.as_ptr())
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut state = self.memory.0.lock();
        state.stats.by_use[self.use_ as usize].live -= self.bytes;
        state.stats.total.live -= self.bytes;
        if let Some(block) = self.block {
            state.free[block.class].push(block);
        }
    }
}

impl Memory {
    pub(crate) fn new() -> Arc<Self> {
        let free = (0..CLASSES).map(|_| Vec::new()).collect();
        Arc::new(Memory(Mutex::new(State { free, stats: MemoryStats::default() })))
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.0.lock().stats.clone()
    }

    pub(crate) fn reset_peak(&self) {
        let stats = &mut self.0.lock().stats;
        stats.by_use.iter_mut().chain([&mut stats.total]).for_each(|b| b.peak = b.live);
    }

    /// `bytes` bytes, booked under `use_`. They are initialised, but arbitrary.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, use_: Use) -> Result<Buffer> {
        let mut state = self.0.lock();
        let block = if bytes == 0 { None } else { Some(state.take(bytes)?) };
        state.book(bytes, use_);
        drop(state);
        Ok(Buffer { block, bytes, use_, memory: self.clone() })
    }
}

impl State {
    fn take(&mut self, bytes: usize) -> Result<Block> {
        let class = class_of(bytes).ok_or_else(|| self.exhausted(bytes))?;
        let near = class..(class + 1 + SLACK).min(CLASSES);
        if let Some(block) = near.into_iter().find_map(|c| self.free[c].pop()) {
            poison(block, bytes);
            return Ok(block);
        }
        let block = Block::new(class).or_else(|| {
            self.release();
            Block::new(class)
        });
        let block = block.ok_or_else(|| self.exhausted(bytes))?;
        self.stats.reserved += size_of_class(class);
        Ok(block)
    }

    fn book(&mut self, bytes: usize, use_: Use) {
        let stats = &mut self.stats;
        stats.allocations += 1;
        for account in [&mut stats.by_use[use_ as usize], &mut stats.total] {
            account.live += bytes;
            account.peak = account.peak.max(account.live);
        }
    }

    /// Gives every free block back to the system.
    fn release(&mut self) {
        for block in self.free.iter_mut().flat_map(|list| list.drain(..)) {
            self.stats.reserved -= size_of_class(block.class);
            block.release();
        }
    }

    fn exhausted(&self, requested: usize) -> numcore::Error {
        let device = DeviceId { kind: DeviceKind::Cpu, index: 0 };
        ErrorKind::OutOfMemory { device, requested, live: self.stats.total.live }.into()
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.release();
    }
}

impl Block {
    fn layout(class: usize) -> Option<Layout> {
        let size = size_of_class(class);
        Layout::from_size_align(size, if size >= HUGE { HUGE } else { ALIGN }).ok()
    }

    /// Fresh memory, all zeros: no kernel ever reads what was never written.
    fn new(class: usize) -> Option<Block> {
        let layout = Self::layout(class)?;
        if layout.size() < HUGE {
            // SAFETY: the size of a class is not zero.
            return NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).map(|start| Block { start, class });
        }
        // SAFETY: as above. Not `alloc_zeroed`, which would touch every page before it can be made a huge one.
        let start = NonNull::new(unsafe { alloc::alloc(layout) })?;
        want_huge_pages(start, layout.size());
        // SAFETY: the block is `size` bytes long.
        unsafe { start.write_bytes(0, layout.size()) };
        Some(Block { start, class })
    }

    fn release(self) {
        if let Some(layout) = Self::layout(self.class) {
            // SAFETY: it was allocated with this layout, and the free list owned it.
            unsafe { alloc::dealloc(self.start.as_ptr(), layout) };
        }
    }
}

/// Fewer page faults and fewer misses of the address cache; a system without huge pages ignores it.
#[cfg(target_os = "linux")]
fn want_huge_pages(start: NonNull<u8>, bytes: usize) {
    // SAFETY: advice about a range that was just allocated; it does not change contents.
    unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn want_huge_pages(_: NonNull<u8>, _: usize) {}

/// In debug builds recycled memory holds NaNs, so that a read of stale values shows.
fn poison(block: Block, bytes: usize) {
    if cfg!(debug_assertions) {
        // SAFETY: the block has at least `bytes` bytes and nothing else refers to it.
        unsafe { block.start.write_bytes(0xff, bytes) };
    }
}

/// The smallest class that holds `bytes`; `None` beyond what an address can reach.
fn class_of(bytes: usize) -> Option<usize> {
    let units = bytes.checked_add(ALIGN - 1)? / ALIGN;
    if units <= STEPS {
        return Some(units.saturating_sub(1));
    }
    // Between 2^e and 2^(e+1) units there are STEPS classes.
    let e = (units - 1).ilog2() as usize;
    let step = 1usize << (e - STEPS.ilog2() as usize);
    let class = STEPS * (e - 2) + (units - (1 << e)).div_ceil(step) - 1;
    (size_of_class(class) <= isize::MAX as usize).then_some(class)
}

/// Bytes of a class's blocks.
fn size_of_class(class: usize) -> usize {
    if class < STEPS {
        return (class + 1) * ALIGN;
    }
    let (e, k) = (class / STEPS + 2, class % STEPS + 1);
    let units = (1usize << e).saturating_add(k << (e - STEPS.ilog2() as usize));
    units.saturating_mul(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_what_they_are_for_and_waste_little() {
        for bytes in (1..20_000).chain((14..45).flat_map(|e| [(1 << e) - 1, 1 << e, (1 << e) + 1, 3 << e])) {
            let class = class_of(bytes).unwrap();
            assert!(size_of_class(class) >= bytes, "{bytes}");
            assert!(class == 0 || size_of_class(class - 1) < bytes, "{bytes}: class {class} is not the smallest");
            assert!(size_of_class(class) <= bytes + bytes / 8 + ALIGN, "{bytes}");
        }
    }

    #[test]
    fn more_than_memory_is_an_error() {
        let memory = Memory::new();
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let e = memory.alloc(bytes, Use::Activations).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::OutOfMemory { requested, .. } if *requested == bytes));
        }
        assert_eq!(memory.stats(), MemoryStats::default());
    }

    #[test]
    fn the_account_is_exact() {
        let memory = Memory::new();
        let a = memory.alloc(1000, Use::Parameters).unwrap();
        let b = memory.alloc(24, Use::Gradients).unwrap();
        drop(a);
        let s = memory.stats();
        assert_eq!(
            (s.total.live, s.total.peak, s.of(Use::Parameters).live, s.of(Use::Parameters).peak),
            (24, 1024, 0, 1000)
        );
        assert_eq!((s.reserved, s.allocations), (1024 + 256, 2));
        let again = memory.alloc(900, Use::Activations).unwrap();
        assert_eq!(memory.stats().reserved, 1024 + 256, "the first block is used again");
        drop((b, again));
        memory.reset_peak();
        assert_eq!(memory.stats().total.peak, 0);
    }

    #[test]
    fn blocks_are_aligned() {
        let memory = Memory::new();
        for bytes in [0, 1, 300, 70_000, 5 << 20] {
            let b = memory.alloc(bytes, Use::Activations).unwrap();
            assert!(b.ptr().addr().is_multiple_of(if bytes > HUGE { HUGE } else { ALIGN }));
        }
    }

    #[test]
    fn fresh_memory_is_zero_and_recycled_memory_is_not_stale() {
        let memory = Memory::new();
        let read = |b: &Buffer| {
            // SAFETY: the buffer has 256 bytes, which are initialised.
            unsafe { std::slice::from_raw_parts(b.ptr(), 256) }.to_vec()
        };
        let a = memory.alloc(256, Use::Activations).unwrap();
        assert!(read(&a).iter().all(|&x| x == 0));
        drop(a);
        let again = memory.alloc(256, Use::Activations).unwrap();
        assert!(!cfg!(debug_assertions) || read(&again).iter().all(|&x| x == 0xff));
    }
}
