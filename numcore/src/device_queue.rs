//! A device's queue as seen by other libraries of its vendor, which a transport between GPUs uses.

use std::sync::Arc;

use crate::{Error, Result};

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
    /// Fails if the queue has failed before.
    fn enter(&self, op: &'static str, work: &mut dyn FnMut()) -> Result<()>;

    /// Queues a mark after all work queued so far.
    ///
    /// # Errors
    /// Fails if the queue has failed before, or if its work is being captured.
    fn mark(&self) -> Result<Arc<dyn QueueMark>>;

    /// Adds a participant to the launches of the step that is being captured on this queue, unless the step has one of
    /// this `key`. Returns false if no step is being captured; `participant` is not called then.
    fn at_launch(&self, key: usize, participant: &mut dyn FnMut() -> Arc<dyn LaunchParticipant>) -> bool;
}

/// A library's part in the launches of a captured step that has calls of the library. It lives as long as the captured
/// step.
pub trait LaunchParticipant: Send + Sync {
    /// Prepares a launch, before any work of it is queued.
    ///
    /// # Errors
    /// An error if the step cannot be launched; nothing is queued then.
    fn before(&self) -> Result<()>;

    /// Ends a launch, after [`before`](LaunchParticipant::before) was called and whether it failed or not. All work is
    /// queued, and the queue of the calls is ordered after it; or the error says why the launch failed.
    fn after(&self, queued: Result<(), &Error>) -> Result<()>;
}

/// A point in a queue that the host can query.
pub trait QueueMark: Send + Sync {
    /// Tells whether the queue has reached this point. Never blocks.
    ///
    /// # Errors
    /// Fails if the queue's device has failed.
    fn is_reached(&self) -> Result<bool>;
}
