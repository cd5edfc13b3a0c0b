//! A gate that keeps other threads from allocating or freeing device memory and from loading modules during a capture.
//! Captures are of one thread, and the driver's documentation lets other threads make such calls. Yet frees synchronise
//! the device, which has broken captures elsewhere. Waiting costs little, since a step is captured once.

use std::thread::{self, ThreadId};

use cudarc::driver::{result::DriverError, sys};
use parking_lot::{Condvar, Mutex};

use super::{DriverFailure, Fallible};

/// Memory that was freed in a captured step, and is freed after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// Device memory at this address.
    Device(u64),
    /// Page-locked host memory at this address.
    Host(u64),
}

/// A lock that many calls or one capture hold.
#[derive(Debug, Default)]
pub struct CaptureGate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// The number of calls that are under way.
    inside: usize,
    /// The thread whose work is captured.
    capturing: Option<ThreadId>,
    freed: Vec<Freed>,
}

/// A guard of a call that would invalidate captures.
#[derive(Debug)]
pub struct CallGuard<'a>(&'a CaptureGate);

impl CaptureGate {
    /// Waits until nothing is captured. In the captured step itself, returns an error that names the forbidden call.
    pub fn enter(&self, what: &str) -> Fallible<CallGuard<'_>> {
        let own = || {
            DriverFailure::new(format!(
                "a captured step cannot {what}; run it two or three times before it is captured"
            ))
        };
        self.wait().ok_or_else(own)
    }

    /// Waits as [`enter`](CaptureGate::enter) does. In the captured step itself, notes `freed` to be freed after the
    /// capture, and returns `None`.
    pub fn enter_or_defer(&self, freed: Freed) -> Option<CallGuard<'_>> {
        let outside = self.wait();
        if outside.is_none() {
            self.state.lock().freed.push(freed);
        }
        outside
    }

    /// Waits until no capture and no call is under way, and begins a capture of this thread.
    pub fn begin(&self) -> Fallible<()> {
        let (mut state, own) = (self.state.lock(), thread::current().id());
        while state.inside > 0 || state.capturing.is_some() {
            if state.capturing == Some(own) {
                return Err(DriverFailure::new("a captured step cannot capture another"));
            }
            self.changed.wait(&mut state);
        }
        state.capturing = Some(own);
        Ok(())
    }

    /// Ends the capture; returns the memory that was freed in it.
    pub fn end(&self) -> Vec<Freed> {
        let mut state = self.state.lock();
        state.capturing = None;
        self.changed.notify_all();
        std::mem::take(&mut state.freed)
    }

    /// Waits until nothing is captured; `None` in a captured step, which would wait for itself.
    fn wait(&self) -> Option<CallGuard<'_>> {
        let (mut state, own) = (self.state.lock(), thread::current().id());
        while let Some(capturing) = state.capturing {
            if capturing == own {
                return None;
            }
            self.changed.wait(&mut state);
        }
        state.inside += 1;
        Some(CallGuard(self))
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.0.state.lock().inside -= 1;
        self.0.changed.notify_all();
    }
}

/// Makes a call that waits for a stream or an event of another stream, also in a captured step of this thread. In a
/// stricter mode the driver refuses that, and invalidates the capture.
pub(super) fn relaxed<T>(call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the pointer is valid; the mode is this thread's alone, and is given back.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result()?;
    let done = call();
    // SAFETY: as above.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result()?;
    done
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use super::*;

    #[test]
    fn others_wait_for_a_capture_and_a_capture_for_others() {
        let (gate, allocated) = (CaptureGate::default(), AtomicUsize::new(0));
        let outside = gate.enter("allocate memory").unwrap();
        thread::scope(|scope| {
            let (gate, allocated) = (&gate, &allocated);
            let capture = scope.spawn(move || {
                gate.begin().unwrap();
                let others: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(move || {
                            let _outside = gate.enter("allocate memory").unwrap();
                            allocated.fetch_add(1, Ordering::SeqCst);
                        })
                    })
                    .collect();
                thread::sleep(Duration::from_millis(30));
                assert_eq!(allocated.load(Ordering::SeqCst), 0, "nobody allocates in a capture");
                gate.end();
                others.into_iter().for_each(|other| other.join().unwrap());
            });
            thread::sleep(Duration::from_millis(30));
            assert_eq!(gate.state.lock().capturing, None, "the capture waits for what is under way");
            drop(outside);
            capture.join().unwrap();
        });
        assert_eq!(allocated.load(Ordering::SeqCst), 4);
    }

    #[test]
    fn a_captured_step_does_not_wait_for_itself() {
        let gate = CaptureGate::default();
        gate.begin().unwrap();
        assert!(gate.begin().is_err());
        let error = gate.enter("load a kernel").err().unwrap().to_string();
        assert!(error.contains("a captured step cannot load a kernel"), "{error}");
        assert!(gate.enter_or_defer(Freed::Device(7)).is_none());
        assert_eq!(gate.end(), [Freed::Device(7)]);
        assert!(gate.enter("load a kernel").is_ok());
    }
}
