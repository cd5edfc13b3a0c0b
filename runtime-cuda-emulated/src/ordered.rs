//! A race detector on the emulator: streams, events and host synchronization must order all conflicting accesses.
//!
//! Every stream, every mark and the host have a vector clock (Fidge and Mattern, 1988): the last operation of each
//! stream that happens before. An access is ordered if the last write to the memory, and for a write all reads since,
//! happen before it. The emulator works off a stream when the host waits for it, so most races show in no value.
//!
//! A kernel may write to memory that its non-`const` pointer parameters point to. A pointer stands for the whole block
//! of its pool; pointers inside of structures (attention's mask) are not seen. A copy to the host ends when the host
//! has waited.

use std::{ops::Range, sync::Arc, time::Duration};

use numcore::DeviceBytes;
use parking_lot::Mutex;
use runtime_cuda::driver::{
    About, CapturedGraph, CublasGemm, CudaStream, Driver, DriverFailure, Fallible, GemmPlaces, Grid, KernelArgs,
    KernelFunction, KernelSource, Mark,
};

use crate::{
    foreign::ForeignCalls,
    gpu::{Emulated, is_refused},
    order_state::OrderState,
    parameters::parameters,
    streams::ForeignCall,
    tracked_block::Access,
    vector_clock::{Moment, VectorClock, join},
};

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

    /// A clock of the device, for a wait of the host. The lock is released, since work may be done in the wait.
    fn clock(&self, of: impl FnOnce(&OrderState) -> Option<&VectorClock>) -> Fallible<VectorClock> {
        let state = self.state.lock();
        state.there()?;
        Ok(of(&state).cloned().unwrap_or_default())
    }

    fn born(&self, address: u64, bytes: usize) {
        self.state.lock().memory.allocated(address, bytes);
    }
}

impl ForeignCalls for Ordered {
    fn queue_foreign(&self, stream: CudaStream, accesses: &[(u64, bool)], call: ForeignCall) -> Fallible<bool> {
        let how = |&(at, is_written): &(u64, bool)| (at, if is_written { Access::Write } else { Access::Read });
        self.note("a call of another library", stream, &accesses.iter().map(how).collect::<Vec<_>>())?;
        self.inner.queue_foreign(stream, accesses, call)
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
        let clock = self.clock(|state| state.marks.get(&mark.0))?;
        let reached = self.inner.is_reached(mark)?;
        if reached {
            self.state.lock().host_sees(&clock);
        }
        Ok(reached)
    }

    fn destroy_stream(&self, stream: CudaStream) {
        self.inner.destroy_stream(stream);
    }

    fn synchronize(&self, stream: CudaStream) -> Fallible<()> {
        let clock = self.clock(|state| state.streams.get(&stream.0))?;
        let done = self.inner.synchronize(stream);
        self.state.lock().host_sees(&clock);
        done
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
        let clock = self.clock(|state| state.marks.get(&mark.0))?;
        let done = self.inner.await_mark(mark);
        self.state.lock().host_sees(&clock);
        done
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
