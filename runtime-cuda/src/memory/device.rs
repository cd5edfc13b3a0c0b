//! The memory state that the queues of one GPU share: the driver, and a list of the queues. A queue short of memory can
//! have the others trim.

use std::sync::{Arc, Weak};

use numcore::DeviceId;
use parking_lot::Mutex;

use super::Memory;
use crate::driver::Driver;

/// An environment variable. With the value `apart` every block is an allocation of the driver's, so `compute-sanitizer`
/// sees accesses of a kernel beyond a block.
const BLOCKS: &str = "WEFTGRAD_CUDA_BLOCKS";

/// A GPU's memory, shared by its queues.
pub(crate) struct DeviceMemory {
    pub driver: Arc<dyn Driver>,
    pub device: DeviceId,
    /// True if every block is an allocation of its own.
    pub apart: bool,
    /// The queues' memories in the order of their creation.
    queues: Mutex<Vec<Weak<Memory>>>,
}

impl DeviceMemory {
    pub(crate) fn new(driver: Arc<dyn Driver>, device: DeviceId) -> Arc<DeviceMemory> {
        let apart = std::env::var_os(BLOCKS).is_some_and(|value| value == "apart");
        Arc::new(DeviceMemory { driver, device, apart, queues: Mutex::default() })
    }

    pub(super) fn register(&self, memory: &Arc<Memory>) {
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(memory));
    }

    /// The memory of all other queues. They are dropped outside of the lock, since the last holder of one may be this
    /// list.
    pub(super) fn others(&self, own: &Memory) -> Vec<Arc<Memory>> {
        let all: Vec<Arc<Memory>> = self.queues.lock().iter().filter_map(Weak::upgrade).collect();
        all.into_iter().filter(|memory| !std::ptr::eq(&**memory, own)).collect()
    }
}
