//! Memory: one pool per queue. Freed blocks are kept by size class and reused, so a training step in its steady state
//! allocates nothing from the driver, and can be captured.
//!
//! Blocks are stream-ordered: all work of a queue runs in order, so a block that was freed may be given to later work
//! of the same queue at once, while earlier work still reads it. Where other queues have used a block, its own queue
//! waits for them first, by an event: the buffer records which they were.

use std::{fmt, sync::Arc};

use numcore::{DeviceId, ErrorKind, MemoryCategory, MemoryStats, Pool, Result};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::{
    driver::{Driver, Stream},
    engine::backend,
};

/// Where memory of no bytes is said to start: as aligned as any.
const NOWHERE: u64 = numcore::ALIGN as u64;

/// A queue's memory: free blocks and the account.
pub(crate) struct Memory {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    stream: Stream,
    state: Mutex<PoolState>,
}

struct PoolState {
    pool: Pool<u64>,
    /// While work is captured: no driver allocation is allowed, and freed blocks belong to the recording.
    capture: Option<Arc<HeldBlocks>>,
}

/// Blocks that a recording writes to whenever it is launched: no one else may have them while it lives.
pub(crate) struct HeldBlocks(Mutex<Option<Blocks>>);

/// Blocks of the queue that is captured, and of others, with the memory that each returns to.
#[derive(Default)]
struct Blocks {
    own: Vec<DeviceBlock>,
    others: Vec<(DeviceBlock, Arc<Memory>)>,
}

impl HeldBlocks {
    /// Keeps a block; gives it back once the recording is gone.
    fn keep(&self, block: DeviceBlock) -> Option<DeviceBlock> {
        match &mut *self.0.lock() {
            Some(blocks) => {
                blocks.own.push(block);
                None
            }
            None => Some(block),
        }
    }

    /// Keeps a block of another queue; false once the recording is gone.
    fn keep_of(&self, memory: &Arc<Memory>, block: DeviceBlock) -> bool {
        let mut blocks = self.0.lock();
        blocks.as_mut().map(|blocks| blocks.others.push((block, memory.clone()))).is_some()
    }

    /// A kept block of this class.
    fn take(&self, class: usize) -> Option<DeviceBlock> {
        let mut blocks = self.0.lock();
        let own = &mut blocks.as_mut()?.own;
        let at = own.iter().rposition(|b| b.class == class)?;
        Some(own.swap_remove(at))
    }
}

#[derive(Clone, Copy)]
struct DeviceBlock {
    address: u64,
    class: usize,
}

/// A block of device memory, which returns to its queue's pool on drop.
pub struct CudaBuffer {
    block: Option<DeviceBlock>,
    bytes: usize,
    use_: MemoryCategory,
    memory: Arc<Memory>,
    /// The recording during which it was allocated.
    held: Option<Arc<HeldBlocks>>,
    /// Other queues whose work has used it.
    others: Mutex<SmallVec<[Arc<Memory>; 1]>>,
}

impl CudaBuffer {
    /// Where it starts on the device; never dereferenced on the host.
    pub(crate) fn address(&self) -> u64 {
        self.block.map_or(NOWHERE, |b| b.address)
    }

    /// Notes that the queue of `memory` is about to use it.
    pub(crate) fn used_by(&self, memory: &Arc<Memory>) {
        if Arc::ptr_eq(&self.memory, memory) || self.block.is_none() {
            return;
        }
        let mut others = self.others.lock();
        if !others.iter().any(|other| Arc::ptr_eq(other, memory)) {
            others.push(memory.clone());
        }
    }
}

impl fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaBuffer({} bytes)", self.bytes)
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        let block = self.block.take();
        // Before the lock is taken: two queues may drop memory that the other has used.
        let block = block.and_then(|block| self.after_others(block));
        let mut state = self.memory.state.lock();
        state.pool.unbook(self.bytes, self.use_);
        let Some(block) = block else { return };
        let holder = state.capture.as_ref().or(self.held.as_ref());
        let block = if let Some(held) = holder { held.keep(block) } else { Some(block) };
        if let Some(block) = block {
            state.pool.put(block.class, block.address);
        }
    }
}

impl CudaBuffer {
    /// Orders later work of the own queue after that of others which have used the block. A queue that is captured uses it in every replay:
    /// its recording keeps the block then, and nothing is waited for, since that would draw the own queue into the capture.
    fn after_others(&mut self, block: DeviceBlock) -> Option<DeviceBlock> {
        let others = std::mem::take(self.others.get_mut());
        if others.is_empty() {
            return Some(block);
        }
        let capturing = self.memory.capturing().is_some();
        let (captured, free): (Vec<_>, Vec<_>) = others.into_iter().partition(|other| other.capturing().is_some());
        free.iter().for_each(|other| self.memory.follow(other, capturing));
        let kept = |other: &Arc<Memory>| other.capturing().is_some_and(|held| held.keep_of(&self.memory, block));
        (!captured.iter().any(kept)).then_some(block)
    }
}

impl Memory {
    pub(crate) fn new(driver: Arc<dyn Driver>, device: DeviceId, stream: Stream) -> Arc<Memory> {
        let state = PoolState { pool: Pool::default(), capture: None };
        Arc::new(Memory { driver, device, stream, state: Mutex::new(state) })
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.state.lock().pool.stats().clone()
    }

    pub(crate) fn reset_peak(&self) {
        self.state.lock().pool.reset_peak();
    }

    /// Gives every free block back; none while work is captured.
    pub(crate) fn trim(&self) {
        if self.capturing().is_none() {
            self.release();
        }
    }

    /// From here on work is captured.
    pub(crate) fn begin_capture(&self) -> Arc<HeldBlocks> {
        let held = Arc::new(HeldBlocks(Mutex::new(Some(Blocks::default()))));
        self.state.lock().capture = Some(held.clone());
        held
    }

    /// Ends the capture; blocks freed since its begin stay with the recording.
    pub(crate) fn end_capture(&self) {
        self.state.lock().capture = None;
    }

    /// The recording of the capture in progress, if there is one.
    fn capturing(&self) -> Option<Arc<HeldBlocks>> {
        self.state.lock().capture.clone()
    }

    /// The recording is gone: its blocks return, for later work of the queue it ran on, and those of other queues after that work.
    pub(crate) fn release_held(&self, held: &HeldBlocks) {
        let blocks = held.0.lock().take().unwrap_or_default();
        for (block, memory) in blocks.others {
            memory.follow(self, memory.capturing().is_some());
            memory.state.lock().pool.put(block.class, block.address);
        }
        let mut state = self.state.lock();
        blocks.own.into_iter().for_each(|b| state.pool.put(b.class, b.address));
    }

    /// `bytes` bytes, booked under `use_`. Their contents are arbitrary.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, use_: MemoryCategory) -> Result<CudaBuffer> {
        let block = if bytes == 0 { None } else { Some(self.take(bytes)?) };
        let mut state = self.state.lock();
        state.pool.book(bytes, use_);
        let held = state.capture.clone();
        drop(state);
        Ok(CudaBuffer { block, bytes, use_, memory: self.clone(), held, others: Mutex::default() })
    }

    /// A block that is free, or a new one. The driver is not called under the lock: it may wait for a capture of another thread, which drops
    /// buffers of this queue meanwhile.
    fn take(&self, bytes: usize) -> Result<DeviceBlock> {
        let class = Pool::<u64>::class_of(bytes).ok_or_else(|| self.exhausted(bytes))?;
        if let Some(block) = self.take_free(class, bytes)? {
            return Ok(block);
        }
        let size = Pool::<u64>::size_of(class);
        let fresh = || self.driver.alloc(size).map_err(|e| backend("alloc", self.device, e));
        let mut address = fresh()?;
        if address.is_none() {
            self.release();
            address = fresh()?;
        }
        let address = address.ok_or_else(|| self.exhausted(bytes))?;
        self.state.lock().pool.reserve(class);
        Ok(DeviceBlock { address, class })
    }

    /// A block that is free. A captured step has no other.
    fn take_free(&self, class: usize, bytes: usize) -> Result<Option<DeviceBlock>> {
        let mut state = self.state.lock();
        let PoolState { pool, capture } = &mut *state;
        let Some(held) = capture else {
            return Ok(pool.take(class).map(|(class, address)| DeviceBlock { address, class }));
        };
        // Size classes are tried in the pool's own order, so that a captured step gets the blocks of the uncaptured step
        // before it.
        let mut free = |class| Some(DeviceBlock { address: pool.take_exactly(class)?, class });
        let found = Pool::<u64>::near(class).find_map(|c| held.take(c).or_else(|| free(c)));
        let why = format!(
            "a captured step asks for {bytes} bytes that its pool does not hold; run it a few times before it is captured"
        );
        let none = || ErrorKind::Unsupported { op: "capture", device: self.device, why };
        found.map(Some).ok_or_else(|| none().into())
    }

    /// Makes later work of this queue wait for the work that is queued on another one.
    fn follow(&self, other: &Memory, capturing: bool) {
        let by_event = || {
            let mark = self.driver.mark()?;
            let done = self.driver.record(mark, other.stream).and_then(|()| self.driver.wait(self.stream, mark));
            self.driver.destroy_mark(mark);
            done
        };
        // A captured stream can wait for nothing outside of its capture. If the device has failed, nothing runs any
        // more.
        if capturing || by_event().is_err() {
            let _ = self.driver.synchronize(other.stream);
        }
    }

    /// Gives every free block back to the driver, once nothing uses it any more.
    fn release(&self) {
        let free: Vec<(usize, u64)> = self.state.lock().pool.drain();
        // If the queue has failed, nothing of it runs any more.
        let _ = self.driver.synchronize(self.stream);
        for (_, address) in free {
            // SAFETY: the pool owned the block, and its queue has passed.
            unsafe { self.driver.free(address) };
        }
    }

    fn exhausted(&self, requested: usize) -> numcore::Error {
        let live = self.state.lock().pool.stats().total.live;
        ErrorKind::OutOfMemory { device: self.device, requested, live }.into()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.release();
        self.driver.destroy_stream(self.stream);
    }
}
