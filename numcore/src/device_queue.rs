//! A device's queue as seen by other libraries of its vendor, which a transport between GPUs uses.

use std::sync::Arc;

use crate::Result;

/// A queue of a device, for work that a library of the device's vendor queues on it, as NCCL does.
///
/// Handles and addresses are numbers, so only `unsafe` code of the library's binding can misuse them. That code must
/// read and write only addresses that [`Runtime::device_address`](crate::Runtime::device_address) and
/// [`device_address_mut`](crate::Runtime::device_address_mut) returned for this queue. It must do so only by work on
/// [`stream`](DeviceQueue::stream) that was queued before the addresses' memory was dropped.
pub trait DeviceQueue: Send + Sync {
    /// The driver's handle of the stream (`CUstream`).
    fn stream(&self) -> usize;

    /// Runs `work` on this thread with the device's context current. `op` is its name in errors.
    ///
    /// # Errors
    /// Fails if the queue has failed before, or if its work is being captured.
    fn enter(&self, op: &'static str, work: &mut dyn FnMut()) -> Result<()>;

    /// Queues a mark after all work queued so far.
    fn mark(&self) -> Result<Arc<dyn QueueMark>>;
}

/// A point in a queue that the host can query.
pub trait QueueMark: Send + Sync {
    /// Tells whether the queue has reached this point. Never blocks.
    ///
    /// # Errors
    /// Fails if the queue's device has failed.
    fn is_reached(&self) -> Result<bool>;
}
