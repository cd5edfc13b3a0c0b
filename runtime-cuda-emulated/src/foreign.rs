//! Calls of other libraries on streams of emulated GPUs, as NCCL makes them with the handle of a stream alone.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use runtime_cuda::driver::{CudaStream, DriverFailure, Fallible};

use crate::streams::ForeignCall;

/// A driver whose streams take calls of other libraries.
pub(crate) trait ForeignCalls: Send + Sync {
    /// Queues a call. Each of `accesses` is an address and true if it is written. Returns true if the call is captured.
    fn queue_foreign(&self, stream: CudaStream, accesses: &[(u64, bool)], call: ForeignCall) -> Fallible<bool>;
}

/// The driver of each stream.
static STREAMS: Mutex<BTreeMap<u64, Weak<dyn ForeignCalls>>> = Mutex::new(BTreeMap::new());

/// Registers a stream of a driver.
pub(crate) fn register(stream: CudaStream, driver: &Weak<dyn ForeignCalls>) {
    STREAMS.lock().insert(stream.0, driver.clone());
}

pub(crate) fn forget(stream: CudaStream) {
    STREAMS.lock().remove(&stream.0);
}

/// Queues a call of another library on a stream of an emulated GPU: the stream begins it once earlier work is done, and
/// goes on when it has ended. Each of `accesses` is an address, and true if it is written. Returns true if the call is
/// captured, and begins in each launch.
///
/// # Errors
/// An error if the stream is not one of an emulated GPU, or the GPU has failed.
pub fn foreign_call(stream: usize, accesses: &[(u64, bool)], call: ForeignCall) -> Fallible<bool> {
    let stream = CudaStream(stream as u64);
    let driver: Option<Arc<dyn ForeignCalls>> = STREAMS.lock().get(&stream.0).and_then(Weak::upgrade);
    let driver = driver.ok_or_else(|| DriverFailure::new("the stream is not one of an emulated GPU"))?;
    driver.queue_foreign(stream, accesses, call)
}
