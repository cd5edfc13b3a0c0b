//! A race detector on the emulator: streams, events and host synchronization must order all conflicting accesses.
//!
//! Every stream, every mark and the host have a vector clock (Fidge and Mattern, 1988): the last operation of each
//! stream that happens before. An access is ordered if the last write to the memory, and for a write all reads since,
//! happen before it. The emulator works off a stream when the host waits for it, so most races show in no value.
//!
//! A kernel may write to memory that its non-`const` pointer parameters point to. A pointer stands for the whole block
//! of its pool; pointers inside of structures (attention's mask) are not seen. A copy to the host ends when the host
//! has waited.

use std::{collections::HashMap, ops::Range, sync::Arc, time::Duration};

use numcore::DeviceBytes;
use parking_lot::Mutex;
use runtime_cuda::driver::{
    About, CapturedGraph, CublasGemm, CudaStream, Driver, DriverFailure, Fallible, GemmPlaces, Grid, KernelArgs,
    KernelFunction, KernelSource, Mark,
};

use crate::{
    candidates::GemmCandidates,
    gpu::{Emulated, LAUNCH_FAILED, is_refused},
    parameters::parameters,
    refusal::GemmRefusal,
    tracked_block::Access,
    tracked_memory::TrackedMemory,
    vector_clock::{Moment, VectorClock, join},
};

#[derive(Default)]
pub(crate) struct OrderState {
    streams: HashMap<u64, VectorClock>,
    marks: HashMap<u64, VectorClock>,
    host: VectorClock,
    memory: TrackedMemory,
    /// The access of every kernel to each of its arguments; `None` for one that is no pointer.
    kernels: HashMap<u64, Vec<Option<Access>>>,
    captured: Option<Vec<(Range<u64>, Access)>>,
    recordings: HashMap<u64, Vec<(Range<u64>, Access)>>,
    pub(crate) complaints: Vec<String>,
    pub(crate) operations: usize,
    pub(crate) refusal: GemmRefusal,
    pub(crate) candidates: GemmCandidates,
    /// The total duration of the product candidates run so far.
    spent: Duration,
    /// The number of copies from the host that succeed before one fails.
    pub(crate) copies_left: Option<usize>,
    pub(crate) gone: bool,
}

impl OrderState {
    fn there(&self) -> Fallible<()> {
        if self.gone { Err(DriverFailure::of_code(LAUNCH_FAILED, "the device is gone")) } else { Ok(()) }
    }

    /// Advances a stream's clock to its next operation.
    fn step(&mut self, stream: CudaStream) -> Moment {
        self.operations += 1;
        let host = self.host.clone();
        let clock = self.streams.entry(stream.0).or_default();
        join(clock, &host);
        let time = clock.entry(stream.0).or_default();
        *time += 1;
        Moment { stream: stream.0, time: *time }
    }

    fn access(&mut self, what: &'static str, moment: Moment, range: Range<u64>, how: Access) {
        let clock = self.streams.get(&moment.stream).cloned().unwrap_or_default();
        let wrong = self.memory.conflicts(&range, &clock, how);
        self.memory.note(&range, moment, what, how);
        let (stream, start) = (moment.stream, range.start);
        self.captured.iter_mut().for_each(|all| all.push((range.clone(), how)));
        self.complain(
            wrong.map(|w| format!("{what} ({how:?}, stream {stream}) is not ordered after {w}, at {start:x}")),
        );
    }

    /// Checks a write to, or a freeing of, `range` by the host.
    fn host_takes(&mut self, what: &str, range: Option<Range<u64>>) {
        let Some(range) = range else { return };
        let wrong = self.memory.conflicts(&range, &self.host, Access::Write);
        self.complain(wrong.map(|w| format!("{what} by the host, which has not waited for {w}, at {:x}", range.start)));
    }

    fn complain(&mut self, line: Option<String>) {
        // The first complaints suffice.
        self.complaints.extend(line.filter(|_| self.complaints.len() < 100));
    }

    /// Checks a call in which the driver waits for all work of the device, under its locks: a stream's kernel may wait
    /// for that of another rank, which the locks keep from being launched.
    fn waits_for_the_device(&mut self, what: &str) {
        // In a captured step the call is put off.
        if self.gone || self.captured.is_some() {
            return;
        }
        let last =
            self.streams.iter().filter_map(|(&stream, clock)| Some(Moment { stream, time: *clock.get(&stream)? }));
        let behind = last.filter(|moment| !moment.seen_by(&self.host)).map(|moment| moment.stream).min();
        self.complain(behind.map(|stream| format!("{what} while the host has not waited for stream {stream}")));
    }

    /// Advances the host's clock to one that it has waited for.
    fn host_sees(&mut self, clock: &VectorClock) {
        join(&mut self.host, clock);
    }

    fn forget(&mut self, what: &str, address: u64) {
        self.host_takes(what, self.memory.allocation(address));
        self.waits_for_the_device(what);
        self.memory.freed(address);
    }
}

/// The driver that checks order; see the module.
pub(crate) struct Ordered {
    pub(crate) inner: Emulated,
    pub(crate) state: Arc<Mutex<OrderState>>,
}

impl Ordered {
    pub(crate) fn new(inner: Emulated) -> Ordered {
        Ordered { inner, state: Arc::default() }
    }

    /// Checks one operation of a stream against the blocks that its pointers stand for.
    fn note(&self, what: &'static str, stream: CudaStream, accesses: &[(u64, Access)]) -> Fallible<Moment> {
        let ranges = {
            let memory = &self.state.lock().memory;
            accesses.iter().filter_map(|(at, how)| Some((memory.range_of(*at)?, *how))).collect::<Vec<_>>()
        };
        self.note_ranges(what, stream, ranges)
    }

    fn note_ranges(
        &self,
        what: &'static str,
        stream: CudaStream,
        ranges: Vec<(Range<u64>, Access)>,
    ) -> Fallible<Moment> {
        let mut state = self.state.lock();
        state.there()?;
        let moment = state.step(stream);
        ranges.into_iter().for_each(|(range, how)| state.access(what, moment, range, how));
        Ok(moment)
    }

    fn born(&self, address: u64, bytes: usize) {
        self.state.lock().memory.allocated(address, bytes);
    }
}

impl Driver for Ordered {
    fn about(&self) -> &About {
        self.inner.about()
    }

    fn memory(&self) -> Option<DeviceBytes> {
        self.inner.memory()
    }

    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>> {
        self.state.lock().there()?;
        self.inner.alloc(bytes).inspect(|at| at.iter().for_each(|at| self.born(*at, bytes)))
    }

    fn note_block(&self, address: u64, bytes: usize) {
        self.state.lock().memory.cut(address..address + bytes as u64);
        self.inner.note_block(address, bytes);
    }

    // SAFETY: the trait's conditions, which are handed on.
    unsafe fn free(&self, streams: &[CudaStream], addresses: &[u64]) {
        streams.iter().for_each(|stream| drop(self.synchronize(*stream)));
        addresses.iter().for_each(|address| self.state.lock().forget("freed", *address));
        // SAFETY: the caller's promise.
        unsafe { self.inner.free(streams, addresses) };
    }

    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8> {
        self.inner.alloc_host(bytes).inspect(|at| self.born(*at as u64, bytes))
    }

    // SAFETY: the trait's conditions, which are handed on.
    unsafe fn free_host(&self, address: *mut u8) {
        self.state.lock().forget("freed", address as u64);
        // SAFETY: the caller's promise.
        unsafe { self.inner.free_host(address) };
    }

    fn stream(&self) -> Fallible<CudaStream> {
        self.inner.stream()
    }

    fn priority_stream(&self) -> Fallible<CudaStream> {
        self.inner.priority_stream()
    }

    fn bind(&self) -> Fallible<()> {
        self.inner.bind()
    }

    fn is_reached(&self, mark: Mark) -> Fallible<bool> {
        let mut state = self.state.lock();
        state.there()?;
        let clock = state.marks.get(&mark.0).cloned().unwrap_or_default();
        let reached = self.inner.is_reached(mark)?;
        if reached {
            state.host_sees(&clock);
        }
        Ok(reached)
    }

    fn destroy_stream(&self, stream: CudaStream) {
        self.inner.destroy_stream(stream);
    }

    fn synchronize(&self, stream: CudaStream) -> Fallible<()> {
        let mut state = self.state.lock();
        state.there()?;
        let clock = state.streams.get(&stream.0).cloned().unwrap_or_default();
        state.host_sees(&clock);
        self.inner.synchronize(stream)
    }

    fn mark(&self) -> Fallible<Mark> {
        self.inner.mark()
    }

    /// Creates a mark whose number is its time, advanced by the durations of product candidates.
    fn timed_mark(&self) -> Fallible<Mark> {
        let spent = self.state.lock().spent.as_nanos() as u64;
        self.inner.timed_mark().map(|mark| Mark(mark.0 + spent))
    }

    fn elapsed(&self, from: Mark, to: Mark) -> Fallible<Duration> {
        self.inner.elapsed(from, to)
    }

    fn destroy_mark(&self, mark: Mark) {
        self.state.lock().marks.remove(&mark.0);
        self.inner.destroy_mark(mark);
    }

    fn record(&self, mark: Mark, stream: CudaStream) -> Fallible<()> {
        let mut state = self.state.lock();
        state.there()?;
        let mut clock = state.streams.get(&stream.0).cloned().unwrap_or_default();
        join(&mut clock, &state.host);
        state.marks.insert(mark.0, clock);
        self.inner.record(mark, stream)
    }

    fn wait(&self, stream: CudaStream, mark: Mark) -> Fallible<()> {
        let mut state = self.state.lock();
        state.there()?;
        // A wait for a mark that was never recorded orders nothing.
        let clock = state.marks.get(&mark.0).cloned().unwrap_or_default();
        join(state.streams.entry(stream.0).or_default(), &clock);
        self.inner.wait(stream, mark)
    }

    fn await_mark(&self, mark: Mark) -> Fallible<()> {
        let mut state = self.state.lock();
        state.there()?;
        let clock = state.marks.get(&mark.0).cloned().unwrap_or_default();
        state.host_sees(&clock);
        self.inner.await_mark(mark)
    }

    // SAFETY: the trait's conditions, which are handed on.
    unsafe fn copy_in(&self, stream: CudaStream, to: u64, from: *const u8, bytes: usize) -> Fallible<()> {
        // The host has just written there.
        let mut state = self.state.lock();
        if state.copies_left == Some(0) {
            state.copies_left = None;
            return Err(DriverFailure::new("a copy from the host fails, as was asked for"));
        }
        state.copies_left = state.copies_left.map(|left| left - 1);
        let range = state.memory.range_of(from as u64);
        state.host_takes("a piece is filled", range);
        drop(state);
        self.note("a copy from the host", stream, &[(from as u64, Access::Read), (to, Access::Write)])?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_in(stream, to, from, bytes) }
    }

    // SAFETY: the trait's conditions, which are handed on.
    unsafe fn copy_out(&self, stream: CudaStream, to: *mut u8, from: u64, bytes: usize) -> Fallible<()> {
        self.note("a copy to the host", stream, &[(from, Access::Read), (to as u64, Access::Write)])?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_out(stream, to, from, bytes) }
    }

    // SAFETY: the trait's conditions, which are handed on.
    unsafe fn copy(&self, stream: CudaStream, to: u64, from: u64, bytes: usize) -> Fallible<()> {
        self.note("a copy", stream, &[(from, Access::Read), (to, Access::Write)])?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy(stream, to, from, bytes) }
    }

    // SAFETY: the trait's conditions, which are handed on.
    unsafe fn zero(&self, stream: CudaStream, at: u64, bytes: usize) -> Fallible<()> {
        self.note("a filling with zeros", stream, &[(at, Access::Write)])?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.zero(stream, at, bytes) }
    }

    fn load(&self, source: &KernelSource, shared: u32) -> Fallible<KernelFunction> {
        let function = self.inner.load(source, shared)?;
        self.state.lock().kernels.insert(function.0, parameters(source));
        Ok(function)
    }

    // SAFETY: the trait's conditions, which are handed on.
    unsafe fn launch(
        &self,
        stream: CudaStream,
        kernel: KernelFunction,
        grid: Grid,
        args: &mut KernelArgs,
    ) -> Fallible<()> {
        let values = args.pointers();
        let parameters = self.state.lock().kernels.get(&kernel.0).cloned().unwrap_or_default();
        if parameters.len() != values.len() {
            return Err(DriverFailure::new(format!("{} arguments for {} parameters", values.len(), parameters.len())));
        }
        let pointers = parameters.iter().zip(values.iter()).filter_map(|(how, arg)| how.map(|how| (*arg, how)));
        // SAFETY: the argument of a parameter that is a pointer is an address.
        let accesses: Vec<(u64, Access)> = pointers.map(|(arg, how)| (unsafe { *arg.cast::<u64>() }, how)).collect();
        self.note("a kernel", stream, &accesses)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.launch(stream, kernel, grid, args) }
    }

    fn gemm_candidates(&self, gemm: &CublasGemm, _: u64, _: usize) -> Fallible<usize> {
        let mut state = self.state.lock();
        state.there()?;
        Ok(state.candidates.of(gemm))
    }

    // SAFETY: the trait's conditions, which are handed on.
    unsafe fn gemm(
        &self,
        stream: CudaStream,
        gemm: &CublasGemm,
        at: GemmPlaces,
        workspace: (u64, usize),
        candidate: Option<usize>,
    ) -> Fallible<()> {
        if is_refused(gemm, at) || self.state.lock().refusal.refuses(gemm, workspace.1) {
            return Err(DriverFailure::not_supported("CUBLAS_STATUS_NOT_SUPPORTED"));
        }
        let sum = gemm.epilogue.writes().then_some(at.vector);
        let writes = [at.d, workspace.0].into_iter().chain(sum).map(|at| (at, Access::Write));
        let accesses: Vec<_> = gemm.reads(at).map(|at| (at, Access::Read)).chain(writes).collect();
        self.note("a product", stream, &accesses)?;
        {
            let mut state = self.state.lock();
            let time = state.candidates.run(candidate);
            state.spent += time;
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.gemm(stream, gemm, at, workspace, candidate) }
    }

    fn begin_capture(&self, stream: CudaStream) -> Fallible<()> {
        self.state.lock().captured = Some(Vec::new());
        self.inner.begin_capture(stream)
    }

    fn end_capture(&self, stream: CudaStream) -> Fallible<CapturedGraph> {
        let recording = self.inner.end_capture(stream)?;
        let mut state = self.state.lock();
        let accesses = state.captured.take().unwrap_or_default();
        state.recordings.insert(recording.0, accesses);
        Ok(recording)
    }

    fn replay(&self, recording: CapturedGraph, stream: CudaStream) -> Fallible<()> {
        let accesses = self.state.lock().recordings.get(&recording.0).cloned().unwrap_or_default();
        self.note_ranges("a captured step", stream, accesses)?;
        self.inner.replay(recording, stream)
    }

    fn destroy_recording(&self, recording: CapturedGraph) {
        self.state.lock().recordings.remove(&recording.0);
        self.inner.destroy_recording(recording);
    }
}
