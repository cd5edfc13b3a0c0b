//! Captures of the emulator: work of captured streams is kept instead of done, and queued at each replay. A call that
//! breaks a capture of the CUDA driver breaks this one, with the same code.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use runtime_cuda::driver::{CapturedGraph, CudaStream, DriverFailure, Fallible, Mark};

use crate::{
    streams::StreamWork,
    vector_clock::{VectorClock, join},
};

/// One call of a captured step, on a stream.
#[derive(Clone)]
pub(crate) enum CapturedCall {
    Work(StreamWork),
    Record(Mark),
    Wait(Mark),
}

/// A captured step: its calls in the order in which the host made them.
#[derive(Default)]
pub(crate) struct Recording {
    /// The stream on which the step began.
    origin: u64,
    calls: Vec<(CudaStream, CapturedCall)>,
    /// Streams of replays in place of those that joined.
    branches: HashMap<u64, CudaStream>,
}

impl Recording {
    /// The calls of a replay on `stream`.
    pub(crate) fn calls(&self, stream: CudaStream) -> impl Iterator<Item = (CudaStream, &CapturedCall)> {
        let of = move |own: &CudaStream| self.branches.get(&own.0).copied().unwrap_or(stream);
        self.calls.iter().map(move |(own, call)| (of(own), call))
    }

    /// The streams of replays beside that on which the recording is replayed.
    pub(crate) fn branches(&self) -> impl Iterator<Item = CudaStream> {
        self.branches.values().copied()
    }
}

struct OpenCapture {
    recording: Recording,
    /// For each stream the calls that come before its end.
    clocks: HashMap<u64, VectorClock>,
    /// The error that `end_capture` will report.
    broken: Option<(u32, &'static str)>,
}

impl OpenCapture {
    fn push(&mut self, stream: CudaStream, call: CapturedCall) {
        self.recording.calls.push((stream, call));
        *self.clocks.entry(stream.0).or_default().entry(stream.0).or_default() += 1;
    }

    /// Tells whether the first stream has waited for the ends of all that joined.
    fn is_joined(&self) -> bool {
        let first = &self.clocks[&self.recording.origin];
        self.clocks.iter().all(|(stream, own)| first.get(stream) >= own.get(stream))
    }
}

#[derive(Default)]
struct CaptureState {
    /// Captures by their first stream.
    open: HashMap<u64, OpenCapture>,
    /// The first stream of the capture to which a stream belongs.
    of: HashMap<u64, u64>,
    /// Marks that were recorded in a capture: its first stream, and the calls before.
    marks: HashMap<u64, (u64, VectorClock)>,
    recordings: HashMap<u64, Arc<Recording>>,
}

impl CaptureState {
    fn capture_of(&mut self, stream: CudaStream) -> Option<&mut OpenCapture> {
        self.of.get(&stream.0).and_then(|origin| self.open.get_mut(origin))
    }
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
        match self.0.lock().capture_of(stream) {
            None => Some(work),
            Some(capture) => {
                capture.push(stream, CapturedCall::Work(work));
                None
            }
        }
    }

    pub(crate) fn is_captured(&self, stream: CudaStream) -> bool {
        self.0.lock().of.contains_key(&stream.0)
    }

    pub(crate) fn begin(&self, stream: CudaStream) {
        let recording = Recording { origin: stream.0, ..Recording::default() };
        let clocks = HashMap::from([(stream.0, VectorClock::default())]);
        let mut state = self.0.lock();
        state.open.insert(stream.0, OpenCapture { recording, clocks, broken: None });
        state.of.insert(stream.0, stream.0);
    }

    /// Ends the capture that began on a stream; `next` makes a number for the recording and for each of its branches.
    pub(crate) fn end(&self, stream: CudaStream, next: impl Fn() -> u64) -> Fallible<CapturedGraph> {
        let mut state = self.0.lock();
        let Some(mut capture) = state.open.remove(&stream.0) else { return Err(failure(INVALIDATED)) };
        state.marks.retain(|_, (of, _)| *of != stream.0);
        state.of.retain(|_, of| *of != stream.0);
        let unjoined = (!capture.is_joined()).then_some(UNJOINED);
        if let Some(broken) = capture.broken.or(unjoined) {
            return Err(failure(broken));
        }
        let joined = capture.clocks.keys().filter(|own| **own != stream.0);
        capture.recording.branches = joined.map(|own| (*own, CudaStream(next()))).collect();
        let number = next();
        state.recordings.insert(number, Arc::new(capture.recording));
        Ok(CapturedGraph(number))
    }

    pub(crate) fn recording(&self, recording: CapturedGraph) -> Arc<Recording> {
        self.0.lock().recordings.get(&recording.0).cloned().unwrap_or_default()
    }

    pub(crate) fn forget(&self, recording: CapturedGraph) {
        self.0.lock().recordings.remove(&recording.0);
    }

    /// Checks that a stream for which the host waits is not captured; a captured one is broken.
    pub(crate) fn synchronize(&self, stream: CudaStream) -> Fallible<()> {
        match self.0.lock().capture_of(stream) {
            None => Ok(()),
            Some(capture) => {
                capture.broken = Some(INVALIDATED);
                Err(failure(UNSUPPORTED))
            }
        }
    }

    /// Checks that a mark about which the host asks is not one of a capture, which is broken otherwise.
    pub(crate) fn query(&self, mark: Mark) -> Fallible<()> {
        let of = self.0.lock().marks.get(&mark.0).map(|(of, _)| *of);
        of.map_or(Ok(()), |stream| self.synchronize(CudaStream(stream)))
    }

    /// Records a mark; returns false if it is one of a capture.
    pub(crate) fn record(&self, mark: Mark, stream: CudaStream) -> bool {
        let mut state = self.0.lock();
        let Some(capture) = state.capture_of(stream) else {
            state.marks.remove(&mark.0);
            return true;
        };
        capture.push(stream, CapturedCall::Record(mark));
        let (origin, clock) = (capture.recording.origin, capture.clocks[&stream.0].clone());
        state.marks.insert(mark.0, (origin, clock));
        false
    }

    /// Checks a wait of a stream. A captured stream may wait for nothing outside of its capture. Another stream that
    /// waits for a mark of a capture joins it. Returns true if neither is captured.
    pub(crate) fn wait(&self, stream: CudaStream, mark: Mark) -> Fallible<bool> {
        let mut state = self.0.lock();
        let marked = state.marks.get(&mark.0).cloned();
        let own = state.of.get(&stream.0).copied();
        if let Some(capture) = state.capture_of(stream)
            && own != marked.as_ref().map(|(of, _)| *of)
        {
            capture.broken = Some(INVALIDATED);
            return Err(failure(ISOLATION));
        }
        let Some((origin, clock)) = marked else { return Ok(true) };
        state.of.insert(stream.0, origin);
        if let Some(capture) = state.open.get_mut(&origin) {
            capture.push(stream, CapturedCall::Wait(mark));
            join(capture.clocks.entry(stream.0).or_default(), &clock);
        }
        Ok(false)
    }
}
