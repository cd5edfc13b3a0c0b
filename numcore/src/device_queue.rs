//! A queue of a device as other libraries of the device's vendor see it: what an engine between GPUs needs of a runtime.

use std::sync::Arc;

use crate::Result;

/// A queue of a device, for work that a library of the vendor's queues on it, as NCCL does.
///
/// Nothing here can be misused without `unsafe` code of the library's binding: handles and addresses are numbers. What that code must
/// keep to: it reads and writes only addresses that [`Runtime::device_address`](crate::Runtime::device_address) and
/// [`device_address_mut`](crate::Runtime::device_address_mut) gave for this queue, only by work on [`stream`](DeviceQueue::stream), and only
/// work that was queued before their memory was dropped.
pub trait DeviceQueue: Send + Sync {
    /// The driver's handle of the stream (`CUstream`).
    fn stream(&self) -> usize;

    /// Runs `work` in this thread, with the device's context current. `op` names it in errors.
    ///
    /// # Errors
    /// If the queue has failed before, or its work is being captured.
    fn enter(&self, op: &'static str, work: &mut dyn FnMut()) -> Result<()>;

    /// A mark after all work that has been queued so far.
    fn mark(&self) -> Result<Arc<dyn QueueMark>>;
}

/// A point in a queue that the host can ask about.
pub trait QueueMark: Send + Sync {
    /// Whether the queue has come here. Never blocks.
    ///
    /// # Errors
    /// If the queue's device has failed.
    fn is_reached(&self) -> Result<bool>;
}
