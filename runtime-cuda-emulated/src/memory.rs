//! The capacity of an emulated GPU's memory, and its allocations.

use std::{collections::HashMap, fmt, sync::Arc};

use numcore::DeviceBytes;
use parking_lot::Mutex;

/// The memory of an emulated GPU; allocations beyond its capacity are refused.
#[derive(Clone)]
pub struct EmulatedMemory(Arc<Mutex<MemoryState>>);

struct MemoryState {
    capacity: usize,
    used: usize,
    allocations: usize,
    blocks: HashMap<u64, usize>,
    /// The number of allocations that succeed before all others are refused.
    left: usize,
}

impl EmulatedMemory {
    pub(crate) fn new(capacity: usize) -> EmulatedMemory {
        EmulatedMemory(Arc::new(Mutex::new(MemoryState {
            capacity,
            used: 0,
            allocations: 0,
            blocks: HashMap::new(),
            left: usize::MAX,
        })))
    }

    /// Changes the capacity in bytes; existing allocations stay.
    pub fn limit(&self, bytes: usize) {
        self.0.lock().capacity = bytes;
    }

    /// Refuses allocations from now on, after `allocations` that succeed; `usize::MAX` for none.
    pub fn refuse_after(&self, allocations: usize) {
        self.0.lock().left = allocations;
    }

    /// Bytes that are allocated now.
    pub fn used(&self) -> usize {
        self.0.lock().used
    }

    /// The number of allocations so far, refused ones not counted.
    pub fn allocations(&self) -> usize {
        self.0.lock().allocations
    }

    /// Capacity and free bytes, as a driver reports them.
    pub fn bytes(&self) -> DeviceBytes {
        let state = self.0.lock();
        DeviceBytes { capacity: state.capacity, free: state.capacity.saturating_sub(state.used) }
    }

    /// Allocates by `allocate`, which returns an address, unless there is too little memory.
    pub(crate) fn allocate(&self, bytes: usize, allocate: impl FnOnce() -> Option<u64>) -> Option<u64> {
        let mut state = self.0.lock();
        if state.left == 0 || bytes > state.capacity.saturating_sub(state.used) {
            return None;
        }
        let address = allocate()?;
        state.used += bytes;
        state.allocations += 1;
        state.left = state.left.saturating_sub(1);
        state.blocks.insert(address, bytes);
        Some(address)
    }

    pub(crate) fn release(&self, address: u64) {
        let mut state = self.0.lock();
        let bytes = state.blocks.remove(&address).unwrap_or(0);
        state.used -= bytes;
    }
}

impl fmt::Debug for EmulatedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EmulatedMemory({} bytes used, {:?})", self.used(), self.bytes())
    }
}
