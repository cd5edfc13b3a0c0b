//! State shared by the communicators of one rank; the first failure ends all of them.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use comm::{Comm, Communicator};
use numcore::{DeviceQueue, Error, ErrorKind, Result, Runtime};
use parking_lot::Mutex;

use super::handle::{CallFailure, Handle, WaitLimit};

/// One rank's side of a world.
pub(crate) struct World<H: Runtime> {
    /// The control plane of all ranks, owned by the rank's communicators. Weak: a rank that has dropped all of them has
    /// left, even while its work is still watched.
    control: Weak<dyn Communicator<H>>,
    pub(crate) world_rank: usize,
    pub(crate) timeout: Duration,
    /// The queue of all calls; `None` on the host.
    queue: Option<Arc<dyn DeviceQueue>>,
    handles: Mutex<Vec<Weak<Handle>>>,
    over: AtomicBool,
}

impl<H: Runtime> World<H> {
    pub(crate) fn new(control: &Comm<H>, queue: Option<Arc<dyn DeviceQueue>>) -> Arc<Self> {
        Arc::new(World {
            control: Arc::downgrade(control),
            world_rank: control.world_rank(),
            timeout: control.timeout(),
            queue,
            handles: Mutex::default(),
            over: AtomicBool::new(false),
        })
    }

    /// The handle of the stream; 0 on the host.
    pub(crate) fn stream(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.stream())
    }

    pub(crate) fn queue(&self) -> Option<&Arc<dyn DeviceQueue>> {
        self.queue.as_ref()
    }

    /// Runs calls of the library with the device's context current on this thread.
    pub(crate) fn enter<T>(&self, op: &'static str, work: impl FnOnce() -> T) -> Result<T> {
        let Some(queue) = &self.queue else { return Ok(work()) };
        let (mut work, mut result) = (Some(work), None);
        queue.enter(op, &mut || result = work.take().map(|work| work()))?;
        result.ok_or_else(|| Error::internal(op, "the queue of a device did not run its task"))
    }

    /// Registers a communicator, to be aborted if the world fails.
    pub(crate) fn keep(&self, handle: &Arc<Handle>) {
        let mut handles = self.handles.lock();
        handles.retain(|handle| handle.strong_count() > 0);
        handles.push(Arc::downgrade(handle));
    }

    /// Removes a communicator that is to be destroyed, so that it is not aborted.
    pub(crate) fn forget(&self, handle: &Arc<Handle>) {
        self.handles.lock().retain(|own| !std::ptr::eq(own.as_ptr(), Arc::as_ptr(handle)));
    }

    /// Tells whether this rank or another has failed. Never blocks.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.control.upgrade().is_some_and(|control| control.poll().is_err())
    }

    pub(crate) fn wait_limit<'a>(&self, is_over: &'a dyn Fn() -> bool) -> WaitLimit<'a> {
        WaitLimit { is_over, deadline: Instant::now() + self.timeout.min(FOR_EVER) }
    }

    /// Returns the world's failure, if it has failed, as an error of call `op`.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        let polled = match self.control.upgrade() {
            Some(control) => control.poll().map_err(|error| of_call(error, op)),
            None => Ok(()),
        };
        if polled.is_err() {
            self.end();
        }
        polled?;
        if self.over.load(Ordering::Acquire) {
            return Err(Error::usage(op, "the communicator was aborted").on_rank(self.world_rank));
        }
        Ok(())
    }

    /// Fails the world for this reason on every rank, and returns the error of call `op`.
    pub(crate) fn fail(&self, op: &'static str, cause: &str) -> Error {
        if let Some(control) = self.control.upgrade() {
            control.abort_for(self.world_rank, cause);
        }
        let error = self.check(op).err();
        self.end();
        let own = || ErrorKind::Peer { op, peer: self.world_rank, cause: cause.into() };
        error.unwrap_or_else(|| Error::from(own()).on_rank(self.world_rank))
    }

    /// The error of a call that failed in the library.
    pub(crate) fn failure_error(&self, op: &'static str, failure: CallFailure) -> Error {
        match failure {
            CallFailure::Over => match self.check(op) {
                Err(error) => error,
                Ok(()) => self.fail(op, "NCCL's communicator was aborted"),
            },
            CallFailure::Late => self.fail(op, &format!("NCCL has not started a call within {:?}", self.timeout)),
            CallFailure::Failed(words) => self.fail(op, &format!("NCCL: {words}")),
        }
    }

    /// An error of the library that came after its call, with the operation to report.
    pub(crate) fn late_error(&self) -> Option<(&'static str, String)> {
        let handles: Vec<Arc<Handle>> = self.handles.lock().iter().filter_map(Weak::upgrade).collect();
        handles.iter().find_map(|handle| handle.late_error()).map(|words| ("poll", format!("NCCL: {words}")))
    }

    /// Aborts the library's communicators, which ends the work queued on the device.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Release);
        let handles = std::mem::take(&mut *self.handles.lock());
        for handle in handles.iter().filter_map(Weak::upgrade) {
            // A queue that a fault has ended is not entered any more. The library binds its device by itself.
            if self.enter("abort", || handle.abort()).is_err() {
                handle.abort();
            }
        }
    }
}

/// A duration longer than any deadline that a clock can still represent.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// Turns the error of a poll into that of the call `op`.
fn of_call(error: Error, op: &'static str) -> Error {
    let rank = error.rank();
    let kind = match error.kind() {
        ErrorKind::Peer { peer, cause, .. } => ErrorKind::Peer { op, peer: *peer, cause: cause.clone() },
        ErrorKind::Mismatch { why, .. } => ErrorKind::Mismatch { op, why: why.clone() },
        ErrorKind::Timeout { waited, missing, called, calls, .. } => {
            ErrorKind::Timeout { op, waited: *waited, missing: missing.clone(), called: *called, calls: calls.clone() }
        }
        _ => return error,
    };
    let error = Error::from(kind);
    match rank {
        Some(rank) => error.on_rank(rank),
        None => error,
    }
}
