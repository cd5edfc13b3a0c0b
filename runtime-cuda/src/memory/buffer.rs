//! The buffers of tensors: blocks that return to their pools.

use std::{fmt, sync::Arc};

use numcore::MemoryCategory;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    Memory,
    held::{Dropped, HeldBlocks},
    segments::DeviceBlock,
};

/// The address of a buffer of no bytes: as aligned as any.
const NOWHERE: u64 = numcore::ALIGN as u64;

/// A block of device memory, which returns to its queue's pool on drop.
pub struct CudaBuffer {
    block: Option<DeviceBlock>,
    bytes: usize,
    use_: MemoryCategory,
    memory: Arc<Memory>,
    /// The recording during whose capture the block was allocated.
    held: Option<Arc<HeldBlocks>>,
    /// Other queues whose work has used the block.
    others: Mutex<SmallVec<[Arc<Memory>; 1]>>,
}

impl CudaBuffer {
    pub(super) fn new(
        memory: &Arc<Memory>,
        block: Option<DeviceBlock>,
        bytes: usize,
        use_: MemoryCategory,
        held: Option<Arc<HeldBlocks>>,
    ) -> CudaBuffer {
        CudaBuffer { block, bytes, use_, memory: memory.clone(), held, others: Mutex::default() }
    }

    /// The device address of the first byte; never dereferenced on the host.
    pub(crate) fn address(&self) -> u64 {
        self.block.map_or(NOWHERE, |b| b.address)
    }

    /// Notes that the queue of `memory` is about to use the block.
    pub(crate) fn used_by(&self, memory: &Arc<Memory>) {
        if Arc::ptr_eq(&self.memory, memory) || self.block.is_none() {
            return;
        }
        let mut others = self.others.lock();
        if !others.iter().any(|other| Arc::ptr_eq(other, memory)) {
            others.push(memory.clone());
        }
    }

    /// Orders later work of the own queue after that of other queues which have used the block, and returns the block
    /// to free. Queues of one captured step wait for each other in it. A queue of another captured step uses the block
    /// in every replay, so that recording keeps the block, and `None` is returned. The own queue does not wait for it,
    /// since it would join the step.
    fn after_others(&mut self, block: DeviceBlock) -> Option<DeviceBlock> {
        let others = std::mem::take(self.others.get_mut());
        if others.is_empty() {
            return Some(block);
        }
        let own = self.memory.capturing();
        let is_apart = |other: &Arc<Memory>| match (&own, other.capturing()) {
            (Some(own), Some(other)) => !Arc::ptr_eq(own, &other),
            (None, Some(_)) => true,
            (_, None) => false,
        };
        let (captured, others): (Vec<_>, Vec<_>) = others.into_iter().partition(is_apart);
        for other in &others {
            self.memory.follow(other, own.is_some() && other.capturing().is_none());
        }
        let dropped = || Dropped { block, memory: self.memory.clone(), held: self.held.clone() };
        let kept = |other: &Arc<Memory>| other.capturing().is_some_and(|held| held.keep(dropped()));
        (!captured.iter().any(kept)).then_some(block)
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
        // Done before the lock is taken: two queues may drop memory that the other has used.
        let block = block.and_then(|block| self.after_others(block));
        let mut state = self.memory.state.lock();
        state.account.unbook(self.bytes, self.use_);
        if let Some(block) = block {
            state.take_back(&self.memory, block, self.held.take());
        }
    }
}
