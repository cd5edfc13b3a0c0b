//! Captures of the emulator: work of a captured stream is kept instead of done, and done at each replay. A call that
//! breaks a capture of the CUDA driver breaks this one, with the same code.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use runtime_cuda::driver::{CapturedGraph, CudaStream, DriverFailure, Fallible, Mark};

use crate::streams::StreamWork;

#[derive(Default)]
struct OpenCapture {
    work: Vec<StreamWork>,
    /// The error that `end_capture` will report.
    broken: Option<(u32, &'static str)>,
}

#[derive(Default)]
struct CaptureState {
    open: HashMap<u64, OpenCapture>,
    /// Marks that were recorded in a capture, with its stream.
    marks: HashMap<u64, u64>,
    recordings: HashMap<u64, Arc<Vec<StreamWork>>>,
}

/// Captures in progress, and recordings.
#[derive(Default)]
pub(crate) struct Captures(Mutex<CaptureState>);

fn failure((code, name): (u32, &'static str)) -> DriverFailure {
    DriverFailure::of_code(code, name)
}

const INVALIDATED: (u32, &str) = (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
const UNSUPPORTED: (u32, &str) = (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
const UNJOINED: (u32, &str) = (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED");
const ISOLATION: (u32, &str) = (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION");

impl Captures {
    /// Keeps work of a stream that is captured; returns that of other streams.
    pub(crate) fn keep(&self, stream: CudaStream, work: StreamWork) -> Option<StreamWork> {
        match self.0.lock().open.get_mut(&stream.0) {
            None => Some(work),
            Some(capture) => {
                capture.work.push(work);
                None
            }
        }
    }

    pub(crate) fn begin(&self, stream: CudaStream) {
        self.0.lock().open.insert(stream.0, OpenCapture::default());
    }

    pub(crate) fn end(&self, stream: CudaStream, recording: CapturedGraph) -> Fallible<CapturedGraph> {
        let mut state = self.0.lock();
        let capture = state.open.remove(&stream.0).unwrap_or_default();
        state.marks.retain(|_, of| *of != stream.0);
        if let Some(broken) = capture.broken {
            return Err(failure(broken));
        }
        state.recordings.insert(recording.0, Arc::new(capture.work));
        Ok(recording)
    }

    pub(crate) fn recording(&self, recording: CapturedGraph) -> Arc<Vec<StreamWork>> {
        self.0.lock().recordings.get(&recording.0).cloned().unwrap_or_default()
    }

    pub(crate) fn forget(&self, recording: CapturedGraph) {
        self.0.lock().recordings.remove(&recording.0);
    }

    /// Checks that a stream for which the host waits is not captured; a captured one is broken.
    pub(crate) fn synchronize(&self, stream: CudaStream) -> Fallible<()> {
        match self.0.lock().open.get_mut(&stream.0) {
            None => Ok(()),
            Some(capture) => {
                capture.broken = Some(INVALIDATED);
                Err(failure(UNSUPPORTED))
            }
        }
    }

    /// Checks that a mark about which the host asks is not one of a capture, which is broken otherwise.
    pub(crate) fn query(&self, mark: Mark) -> Fallible<()> {
        let of = self.0.lock().marks.get(&mark.0).copied();
        of.map_or(Ok(()), |stream| self.synchronize(CudaStream(stream)))
    }

    /// Records a mark; returns false if it is one of a capture.
    pub(crate) fn record(&self, mark: Mark, stream: CudaStream) -> bool {
        let mut state = self.0.lock();
        let is_captured = state.open.contains_key(&stream.0);
        match is_captured {
            true => drop(state.marks.insert(mark.0, stream.0)),
            false => drop(state.marks.remove(&mark.0)),
        }
        !is_captured
    }

    /// Checks a wait of a stream. A captured stream may wait for nothing outside of its capture. Another stream that
    /// waits for a mark of a capture joins it, and is never joined back here, which breaks the capture. Returns true if
    /// neither is captured.
    pub(crate) fn wait(&self, stream: CudaStream, mark: Mark) -> Fallible<bool> {
        let mut state = self.0.lock();
        let of = state.marks.get(&mark.0).copied();
        if of == Some(stream.0) {
            return Ok(false);
        }
        if let Some(capture) = state.open.get_mut(&stream.0) {
            capture.broken = Some(INVALIDATED);
            return Err(failure(ISOLATION));
        }
        if let Some(capture) = of.and_then(|of| state.open.get_mut(&of)) {
            capture.broken = Some(UNJOINED);
        }
        Ok(of.is_none())
    }
}
