//! One communicator of the library: one call at a time, each until the library has finished it on the host.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::api::{NcclApi, RawComm, Status};

/// The way in which a call on a communicator failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallFailure {
    /// The library returned an error, with this text.
    Failed(String),
    /// The world had failed, so the communicator was aborted.
    Over,
    /// The call was still in progress at the deadline.
    Late,
}

/// The conditions that end a wait for the library early.
pub(crate) struct WaitLimit<'a> {
    /// Tells whether the world has failed.
    pub(crate) is_over: &'a dyn Fn() -> bool,
    pub(crate) deadline: Instant,
}

/// A communicator of the library, until it is destroyed or aborted.
pub(crate) struct Handle {
    api: Arc<dyn NcclApi>,
    raw: Mutex<Option<RawComm>>,
    /// True if captured steps may have calls over it.
    is_captured: AtomicBool,
}

impl Handle {
    pub(crate) fn new(api: Arc<dyn NcclApi>, raw: RawComm) -> Handle {
        Handle { api, raw: Mutex::new(Some(raw)), is_captured: AtomicBool::new(false) }
    }

    /// Notes that a captured step has calls over the communicator.
    pub(crate) fn capture(&self) {
        self.is_captured.store(true, Ordering::Release);
    }

    /// Makes a call, and waits until the library has finished it on the host. The work that it queued may still run.
    /// After an error the communicator is aborted.
    pub(crate) fn run(
        &self,
        limit: &WaitLimit<'_>,
        call: impl FnOnce(&dyn NcclApi, RawComm) -> Status,
    ) -> Result<(), CallFailure> {
        let mut raw = self.raw.lock();
        let Some(comm) = *raw else { return Err(CallFailure::Over) };
        let status = call(&*self.api, comm);
        self.complete(comm, status, limit).inspect_err(|_| {
            *raw = None;
            self.abort_now(comm);
        })
    }

    /// Waits until the ranks have joined.
    pub(crate) fn joined(&self, limit: &WaitLimit<'_>) -> Result<(), CallFailure> {
        self.run(limit, |_, _| Status::IN_PROGRESS)
    }

    /// Splits the communicator. Returns the communicator of the ranks with this rank's color, if it has one.
    pub(crate) fn split(
        &self,
        limit: &WaitLimit<'_>,
        color: Option<i32>,
        key: i32,
    ) -> Result<Option<Handle>, CallFailure> {
        let mut slot = None::<&'static AtomicUsize>;
        self.run(limit, |api, comm| match api.split(comm, color, key) {
            Ok(of) => {
                slot = Some(of);
                Status::IN_PROGRESS
            }
            Err(status) => status,
        })?;
        let raw = slot.map_or(0, |slot| slot.load(Ordering::Acquire));
        let part = (raw != 0).then(|| Handle::new(self.api.clone(), RawComm(raw)));
        part.as_ref().map_or(Ok(()), |part| part.joined(limit))?;
        Ok(part)
    }

    /// The text of an error that came after its call, if there is one.
    pub(crate) fn late_error(&self) -> Option<String> {
        // A thread that is making a call gets the error itself.
        let raw = self.raw.try_lock()?;
        let comm = (*raw)?;
        match self.api.state(comm) {
            Status::SUCCESS | Status::IN_PROGRESS => None,
            status => Some(self.api.error_text(status, Some(comm))),
        }
    }

    /// Aborts the communicator, which ends its queued work.
    pub(crate) fn abort(&self) {
        let comm = self.raw.lock().take();
        comm.into_iter().for_each(|comm| self.abort_now(comm));
    }

    /// Aborts a communicator. The library ends its work at once, and then waits for the captured steps that have calls
    /// over it. The caller may be the one to drop them, so another thread waits.
    fn abort_now(&self, comm: RawComm) {
        if !self.is_captured.load(Ordering::Acquire) {
            return self.api.abort(comm);
        }
        let api = self.api.clone();
        let aborting = thread::Builder::new().name("nccl-abort".into()).spawn(move || api.abort(comm));
        // Without a thread the work is left to end by itself.
        drop(aborting);
    }

    /// Destroys the communicator after its queued work, or aborts it if that work does not end.
    pub(crate) fn close(&self, limit: &WaitLimit<'_>) {
        if self.run(limit, |api, comm| api.finalize(comm)).is_err() {
            return;
        }
        // The lock is released first, since destroying waits for other ranks of the machine.
        let comm = self.raw.lock().take();
        if let Some(comm) = comm {
            self.api.destroy(comm);
        }
    }

    fn complete(&self, comm: RawComm, mut status: Status, limit: &WaitLimit<'_>) -> Result<(), CallFailure> {
        let mut rounds = 0;
        while status == Status::SUCCESS || status == Status::IN_PROGRESS {
            // A success is the call's status; the communicator may still be in progress.
            status = self.api.state(comm);
            if status == Status::SUCCESS {
                return Ok(());
            }
            if (limit.is_over)() {
                return Err(CallFailure::Over);
            }
            if Instant::now() >= limit.deadline {
                return Err(CallFailure::Late);
            }
            pause(&mut rounds);
        }
        Err(CallFailure::Failed(self.api.error_text(status, Some(comm))))
    }
}

/// Pauses between polls. The first rounds only spin, as most calls are done at once.
pub(crate) fn pause(rounds: &mut u32) {
    *rounds += 1;
    match *rounds {
        ..=50 => std::hint::spin_loop(),
        51..=100 => thread::yield_now(),
        _ => thread::sleep(Duration::from_micros(50)),
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.abort();
    }
}
