//! Memory: one pool per queue. Freed blocks are kept by size class and reused, so a training step in its steady state
//! requests nothing from the system.

use std::{
    alloc::{self, Layout},
    fmt,
    ptr::NonNull,
    sync::Arc,
};

use numcore::{DeviceId, DeviceKind, ErrorKind, MemoryCategory, MemoryStats, Pool, Result};
use parking_lot::Mutex;

/// The alignment of every block in bytes, which suits SIMD and other runtimes' binding offsets.
const ALIGN: usize = 256;
/// The size from which on blocks are aligned to it, and request huge pages.
const HUGE: usize = 2 << 20;

/// A queue's memory: the free blocks and the statistics.
pub(crate) struct Memory(Mutex<FreeBlocks>);

struct FreeBlocks(Pool<HostBlock>);

#[derive(Clone, Copy)]
struct HostBlock {
    start: NonNull<u8>,
    class: usize,
}

// SAFETY: a block has a single owner: the free list or one buffer.
unsafe impl Send for HostBlock {}

/// A block of memory, which returns to its queue's pool on drop.
pub struct CpuBuffer {
    block: Option<HostBlock>,
    bytes: usize,
    use_: MemoryCategory,
    memory: Arc<Memory>,
}

// SAFETY: a `CpuBuffer` gives out a raw pointer only inside this crate; kernels write through it under the contract of
// `numcore::Runtime` (an output is seen by nothing else meanwhile), and read otherwise.
unsafe impl Sync for CpuBuffer {}
// SAFETY: kernels access the memory under the contract of `numcore::Runtime`; a block is not tied to the thread that
// allocated it.
unsafe impl Send for CpuBuffer {}

impl CpuBuffer {
    /// The address of the first byte. Writes follow the contract of `numcore::Runtime`.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.block.map_or(std::ptr::without_provenance_mut(ALIGN), |b| b.start.as_ptr())
    }
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBuffer({} bytes)", self.bytes)
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        let mut state = self.memory.0.lock();
        state.0.unbook(self.bytes, self.use_);
        if let Some(block) = self.block {
            state.0.put(block.class, block);
        }
    }
}

impl Memory {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Memory(Mutex::new(FreeBlocks(Pool::default()))))
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.0.lock().0.stats().clone()
    }

    pub(crate) fn reset_peak(&self) {
        self.0.lock().0.reset_peak();
    }

    pub(crate) fn trim(&self) {
        self.0.lock().release();
    }

    /// Allocates `bytes` bytes, counted in the category `use_`. They are initialised, but arbitrary.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, use_: MemoryCategory) -> Result<CpuBuffer> {
        let mut state = self.0.lock();
        let block = if bytes == 0 { None } else { Some(state.take(bytes)?) };
        state.0.book(bytes, use_);
        drop(state);
        Ok(CpuBuffer { block, bytes, use_, memory: self.clone() })
    }
}

impl FreeBlocks {
    fn take(&mut self, bytes: usize) -> Result<HostBlock> {
        let class = Pool::<HostBlock>::class_of(bytes).ok_or_else(|| self.exhausted(bytes))?;
        if let Some((_, block)) = self.0.take(class) {
            poison(block, bytes);
            return Ok(block);
        }
        let block = HostBlock::new(class).or_else(|| {
            self.release();
            HostBlock::new(class)
        });
        let block = block.ok_or_else(|| self.exhausted(bytes))?;
        self.0.reserve(class);
        Ok(block)
    }

    /// Returns every free block to the system.
    fn release(&mut self) {
        self.0.drain().into_iter().for_each(|(_, block)| block.release());
    }

    fn exhausted(&self, requested: usize) -> numcore::Error {
        let device = DeviceId { kind: DeviceKind::Cpu, index: 0 };
        ErrorKind::OutOfMemory { device, requested, report: Box::new(self.0.report()) }.into()
    }
}

impl Drop for FreeBlocks {
    fn drop(&mut self) {
        self.release();
    }
}

impl HostBlock {
    fn layout(class: usize) -> Option<Layout> {
        let size = Pool::<HostBlock>::size_of(class);
        Layout::from_size_align(size, if size >= HUGE { HUGE } else { ALIGN }).ok()
    }

    /// Allocates fresh memory, all zeros, so that no kernel ever reads uninitialized memory.
    fn new(class: usize) -> Option<HostBlock> {
        let layout = Self::layout(class)?;
        if layout.size() < HUGE {
            // SAFETY: the size of a class is not zero.
            return NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).map(|start| HostBlock { start, class });
        }
        // SAFETY: the size of a class is not zero. Not `alloc_zeroed`, which would touch every page before it can be
        // made a huge one.
        let start = NonNull::new(unsafe { alloc::alloc(layout) })?;
        want_huge_pages(start, layout.size());
        // SAFETY: the block is `size` bytes long.
        unsafe { start.write_bytes(0, layout.size()) };
        Some(HostBlock { start, class })
    }

    fn release(self) {
        if let Some(layout) = Self::layout(self.class) {
            // SAFETY: it was allocated with this layout, and the free list owned it.
            unsafe { alloc::dealloc(self.start.as_ptr(), layout) };
        }
    }
}

/// Requests huge pages, for fewer page faults and fewer TLB misses. A system without huge pages ignores it.
///
/// Pages that the allocator had in use before are returned first, since small pages stay small.
#[cfg(target_os = "linux")]
fn want_huge_pages(start: NonNull<u8>, bytes: usize) {
    let at = start.as_ptr().cast();
    // SAFETY: whole pages (blocks of this size are multiples of an eighth of a huge one) that were just allocated: no
    // data there is read later.
    unsafe {
        libc::madvise(at, bytes, libc::MADV_DONTNEED);
        libc::madvise(at, bytes, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(target_os = "linux"))]
fn want_huge_pages(_: NonNull<u8>, _: usize) {}

/// Fills recycled memory with NaNs in debug builds, so that a read of stale values shows.
fn poison(block: HostBlock, bytes: usize) {
    if cfg!(debug_assertions) {
        // SAFETY: the block has at least `bytes` bytes and nothing else refers to it.
        unsafe { block.start.write_bytes(0xff, bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_memory_is_an_error() {
        let memory = Memory::new();
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let e = memory.alloc(bytes, MemoryCategory::Activations).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::OutOfMemory { requested, .. } if *requested == bytes));
        }
        assert_eq!(memory.stats(), MemoryStats::default());
    }

    #[test]
    fn the_account_is_exact() {
        let memory = Memory::new();
        let a = memory.alloc(1000, MemoryCategory::Parameters).unwrap();
        let b = memory.alloc(24, MemoryCategory::Gradients).unwrap();
        drop(a);
        let s = memory.stats();
        assert_eq!(
            (s.total.live, s.total.peak, s.of(MemoryCategory::Parameters).live, s.of(MemoryCategory::Parameters).peak),
            (24, 1024, 0, 1000)
        );
        assert_eq!((s.reserved, s.allocations), (1024 + 256, 2));
        let again = memory.alloc(900, MemoryCategory::Activations).unwrap();
        assert_eq!(memory.stats().reserved, 1024 + 256, "the first block is used again");
        drop((b, again));
        memory.reset_peak();
        assert_eq!(memory.stats().total.peak, 0);
    }

    #[test]
    fn blocks_are_aligned() {
        let memory = Memory::new();
        for bytes in [0, 1, 300, 70_000, 5 << 20] {
            let b = memory.alloc(bytes, MemoryCategory::Activations).unwrap();
            assert!(b.ptr().addr().is_multiple_of(if bytes > HUGE { HUGE } else { ALIGN }));
        }
    }

    #[test]
    fn fresh_memory_is_zero_and_recycled_memory_is_not_stale() {
        let memory = Memory::new();
        let read = |b: &CpuBuffer| {
            // SAFETY: the buffer has 256 bytes, which are initialised.
            unsafe { std::slice::from_raw_parts(b.ptr(), 256) }.to_vec()
        };
        let a = memory.alloc(256, MemoryCategory::Activations).unwrap();
        assert!(read(&a).iter().all(|&x| x == 0));
        drop(a);
        let again = memory.alloc(256, MemoryCategory::Activations).unwrap();
        assert!(!cfg!(debug_assertions) || read(&again).iter().all(|&x| x == 0xff));
    }
}
