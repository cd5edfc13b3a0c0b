//! An emulated GPU: kernel sources compiled by NVRTC, whose PTX is interpreted on the host ([`ptx`]).
//!
//! Memory is host memory, and GEMM a plain loop with cuBLASLt's restrictions. Streams run behind the host: work is done
//! when the host waits for it, and its failures are those of a later call. The emulator tests everything except the
//! hardware: plans, arguments, index arithmetic, the kernels' logic, the lifetimes of memory, and errors.

use std::{
    borrow::Cow,
    path::Path,
    sync::{
        Arc, LazyLock, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use numcore::{DType, DeviceBytes};
use parking_lot::Mutex;
use runtime_cuda::driver::{
    About, Architecture, CaptureGate, CapturedGraph, Compiler, CublasGemm, CudaStream, Driver, DriverFailure, Epilogue,
    Fallible, Freed, GemmOperand, GemmPlaces, Grid, KernelArgs, KernelFunction, KernelSource, LoadedModules, Mark,
};

use crate::{
    captures::{CapturedCall, Captures},
    foreign::{self, ForeignCalls},
    live::LiveMemory,
    memory::EmulatedMemory,
    streams::{ForeignCall, StreamWork, Streams},
};

/// The host as a GPU.
pub(crate) struct Emulated {
    about: About,
    pub(crate) memory: EmulatedMemory,
    compiler: Compiler,
    /// A text of kernels, and the text in its place.
    alteration: Option<(String, String)>,
    /// The number of loaded modules that had the text.
    altered: Arc<AtomicU64>,
    modules: LoadedModules<Arc<ptx::PtxModule>>,
    pub(crate) kernels: Mutex<Vec<Arc<ptx::PtxKernel>>>,
    /// The driver that is made of this one, to which other libraries give calls.
    own: OnceLock<Weak<dyn ForeignCalls>>,
    pub(crate) live: LiveMemory,
    captures: Captures,
    gate: CaptureGate,
    streams: Streams,
}

/// `CUDA_ERROR_LAUNCH_FAILED`, after which a context is lost.
pub(crate) const LAUNCH_FAILED: u32 = 719;

/// The most matrices of one product that the library takes.
const MOST_BATCHES: usize = 65_535;

/// The architecture whose PTX is interpreted.
const ARCHITECTURE: Architecture = Architecture(90);

/// A compiler to PTX for emulated GPUs, which keeps it in `folder`.
pub(crate) fn compiler(folder: &Path) -> Compiler {
    Compiler::new(ARCHITECTURE, None, Some(folder.to_path_buf()))
}

pub(crate) fn about() -> About {
    About { name: "emulated on the host".into(), processors: 1, memory: 8 << 30, shared: 163 << 10 }
}

impl Emulated {
    /// Creates an emulated GPU that keeps compiled kernels in `folder`.
    pub(crate) fn new(folder: &Path) -> Emulated {
        Emulated {
            about: about(),
            memory: EmulatedMemory::new(about().memory),
            compiler: compiler(folder),
            alteration: None,
            altered: Arc::default(),
            modules: LoadedModules::default(),
            kernels: Mutex::default(),
            own: OnceLock::new(),
            live: LiveMemory::default(),
            captures: Captures::default(),
            gate: CaptureGate::default(),
            streams: Streams::default(),
        }
    }

    /// Replaces `from` in the sources of kernels by `to`; the number counts the modules that had it.
    pub(crate) fn altering(self, from: &str, to: &str) -> (Emulated, Arc<AtomicU64>) {
        let altered = self.altered.clone();
        (Emulated { alteration: Some((from.into(), to.into())), ..self }, altered)
    }

    /// The source that is compiled in place of another.
    fn altered<'a>(&self, source: &'a KernelSource) -> Cow<'a, KernelSource> {
        match &self.alteration {
            Some((from, to)) if source.text.contains(from) => {
                Cow::Owned(KernelSource { text: source.text.replace(from, to), ..source.clone() })
            }
            _ => Cow::Borrowed(source),
        }
    }

    /// A number of no other stream, mark or recording of any emulated GPU.
    fn number(&self) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Sets the driver that is made of this one.
    pub(crate) fn belongs_to(&self, driver: Weak<dyn ForeignCalls>) {
        // A driver is made of it once.
        let _ = self.own.set(driver);
    }

    fn new_stream(&self) -> CudaStream {
        let stream = CudaStream(self.number());
        self.own.get().into_iter().for_each(|driver| foreign::register(stream, driver));
        stream
    }

    fn release(&self, at: u64) {
        self.memory.release(at);
        self.live.release(at);
    }

    /// Queues work, or keeps it where the stream is captured.
    fn submit(&self, stream: CudaStream, work: StreamWork) -> Fallible<()> {
        let Some(work) = self.captures.keep(stream, work) else { return Ok(()) };
        self.streams.push(stream, work, self.live.blocks(), &|work, blocks| self.perform(work, blocks))
    }
}

impl ForeignCalls for Emulated {
    fn queue_foreign(&self, stream: CudaStream, _: &[(u64, bool)], call: ForeignCall) -> Fallible<bool> {
        let is_captured = self.captures.is_captured(stream);
        self.submit(stream, StreamWork::Foreign(call)).map(|()| is_captured)
    }
}

/// Streams of a driver that has no hardware, and times of marks: those of their creation.
macro_rules! without_hardware {
    () => {
        fn stream(&self) -> Fallible<CudaStream> {
            Ok(self.new_stream())
        }

        fn priority_stream(&self) -> Fallible<CudaStream> {
            self.stream()
        }

        fn mark(&self) -> Fallible<Mark> {
            Ok(Mark(self.number()))
        }

        fn timed_mark(&self) -> Fallible<Mark> {
            static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
            Ok(Mark(ORIGIN.elapsed().as_nanos() as u64))
        }

        fn elapsed(&self, from: Mark, to: Mark) -> Fallible<Duration> {
            Ok(Duration::from_nanos(to.0.saturating_sub(from.0)))
        }
    };
}
pub(crate) use without_hardware;

impl Driver for Emulated {
    fn about(&self) -> &About {
        &self.about
    }

    fn memory(&self) -> Option<DeviceBytes> {
        Some(self.memory.bytes())
    }

    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>> {
        let _outside = self.gate.enter("allocate memory")?;
        self.streams.check()?;
        Ok(self.memory.allocate(bytes, || self.live.allocate(bytes)))
    }

    fn note_block(&self, address: u64, bytes: usize) {
        self.live.note_block(address, bytes);
    }

    // SAFETY: the trait's conditions; a map records the allocations.
    unsafe fn free(&self, streams: &[CudaStream], addresses: &[u64]) {
        // In a captured step of this thread there is no guard, and the addresses are freed after it.
        let _outside = self.gate.enter("free memory");
        // On a failed stream nothing runs any more.
        streams.iter().for_each(|stream| drop(self.synchronize(*stream)));
        for address in addresses {
            let Some(_outside) = self.gate.enter_or_defer(Freed::Device(*address)) else { continue };
            self.release(*address);
        }
    }

    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8> {
        let _outside = self.gate.enter("allocate memory")?;
        self.live.allocate(bytes).map(|at| at as *mut u8).ok_or_else(|| DriverFailure::new("out of memory"))
    }

    // SAFETY: as above.
    unsafe fn free_host(&self, address: *mut u8) {
        let Some(_outside) = self.gate.enter_or_defer(Freed::Host(address as u64)) else { return };
        self.release(address as u64);
    }

    without_hardware!();

    fn bind(&self) -> Fallible<()> {
        self.streams.check()
    }

    fn destroy_stream(&self, stream: CudaStream) {
        // There is nobody left to be told of a failure.
        let _ = self.synchronize(stream);
        self.streams.destroy(stream);
        foreign::forget(stream);
    }

    fn synchronize(&self, stream: CudaStream) -> Fallible<()> {
        self.captures.synchronize(stream)?;
        self.streams.finish(stream, &|work, blocks| self.perform(work, blocks))
    }

    fn record(&self, mark: Mark, stream: CudaStream) -> Fallible<()> {
        if self.captures.record(mark, stream) {
            self.streams.record(mark, stream);
        }
        Ok(())
    }

    fn wait(&self, stream: CudaStream, mark: Mark) -> Fallible<()> {
        if self.captures.wait(stream, mark)? { self.streams.wait(stream, mark) } else { Ok(()) }
    }

    fn is_reached(&self, mark: Mark) -> Fallible<bool> {
        self.captures.query(mark)?;
        self.streams.is_reached(mark, &|work, blocks| self.perform(work, blocks))
    }

    fn await_mark(&self, mark: Mark) -> Fallible<()> {
        self.captures.query(mark)?;
        self.streams.await_mark(mark, &|work, blocks| self.perform(work, blocks))
    }

    fn destroy_mark(&self, mark: Mark) {
        self.streams.forget(mark);
    }

    fn begin_capture(&self, stream: CudaStream) -> Fallible<()> {
        self.gate.begin()?;
        self.captures.begin(stream);
        Ok(())
    }

    fn end_capture(&self, stream: CudaStream) -> Fallible<CapturedGraph> {
        let recording = self.captures.end(stream, || self.number());
        for freed in self.gate.end() {
            match freed {
                Freed::Device(address) | Freed::Host(address) => self.release(address),
            }
        }
        recording
    }

    fn replay(&self, recording: CapturedGraph, stream: CudaStream) -> Fallible<()> {
        self.captures.recording(recording).calls(stream).try_for_each(|(stream, call)| match call {
            CapturedCall::Work(work) => self.submit(stream, work.clone()),
            CapturedCall::Record(mark) => self.record(*mark, stream),
            CapturedCall::Wait(mark) => self.wait(stream, *mark),
        })
    }

    fn destroy_recording(&self, recording: CapturedGraph) {
        self.captures.recording(recording).branches().for_each(|branch| self.destroy_stream(branch));
        self.captures.forget(recording);
    }

    // SAFETY: the trait's conditions; addresses are checked when the copy is done.
    unsafe fn copy_in(&self, stream: CudaStream, to: u64, from: *const u8, bytes: usize) -> Fallible<()> {
        self.submit(stream, StreamWork::Copy { to, from: from as u64, bytes })
    }

    // SAFETY: as above.
    unsafe fn copy_out(&self, stream: CudaStream, to: *mut u8, from: u64, bytes: usize) -> Fallible<()> {
        self.submit(stream, StreamWork::Copy { to: to as u64, from, bytes })
    }

    // SAFETY: as above.
    unsafe fn copy(&self, stream: CudaStream, to: u64, from: u64, bytes: usize) -> Fallible<()> {
        self.submit(stream, StreamWork::Copy { to, from, bytes })
    }

    // SAFETY: as above.
    unsafe fn zero(&self, stream: CudaStream, at: u64, bytes: usize) -> Fallible<()> {
        self.submit(stream, StreamWork::Zero { at, bytes })
    }

    fn load(&self, source: &KernelSource, _: u32) -> Fallible<KernelFunction> {
        let _outside = self.gate.enter("load a kernel")?;
        let named = |words: String| DriverFailure::new(format!("kernel {}: {words}", source.entry));
        let source = self.altered(source);
        let module = self.modules.get_or_load(&source, || {
            let text = self.compiler.ptx(&source)?;
            self.altered.fetch_add(u64::from(matches!(source, Cow::Owned(_))), Ordering::Relaxed);
            ptx::PtxModule::parse(&text).map(Arc::new).map_err(|e| named(e.to_string()))
        })?;
        let kernel = module.kernel(&source.entry).ok_or_else(|| named("its PTX has no such entry".into()))?;
        let mut kernels = self.kernels.lock();
        kernels.push(kernel);
        Ok(KernelFunction(kernels.len() as u64 - 1))
    }

    // SAFETY: the trait's conditions; accesses outside of live memory are errors.
    unsafe fn launch(
        &self,
        stream: CudaStream,
        kernel: KernelFunction,
        grid: Grid,
        args: &mut KernelArgs,
    ) -> Fallible<()> {
        let [x, y, z] = grid.blocks.map(|b| b as u32);
        if grid.threads[0] * grid.threads[1] > 1024 || y > 65_535 || z > 65_535 || x * y * z == 0 || x > i32::MAX as u32
        {
            return Err(DriverFailure::new(format!("a launch beyond the device's limits: {grid:?}")));
        }
        self.submit(stream, StreamWork::Launch(kernel, grid, Box::new(args.clone())))
    }

    fn gemm_candidates(&self, _: &CublasGemm, _: u64, _: usize) -> Fallible<usize> {
        Ok(1)
    }

    // SAFETY: the trait's conditions.
    unsafe fn gemm(
        &self,
        stream: CudaStream,
        gemm: &CublasGemm,
        at: GemmPlaces,
        _: (u64, usize),
        _: Option<usize>,
    ) -> Fallible<()> {
        let (a, b) = (&gemm.a, &gemm.b);
        let rows = |side: &GemmOperand, rows, columns| if side.transposed { columns } else { rows };
        if a.leading < rows(a, gemm.m, gemm.k).max(1)
            || b.leading < rows(b, gemm.k, gemm.n).max(1)
            || [Some(&gemm.d), gemm.c.as_ref()].into_iter().flatten().any(|side| side.leading < gemm.m)
        {
            return Err(DriverFailure::new(format!("a leading dimension is too small: {gemm:?}")));
        }
        if gemm.m * gemm.n * gemm.k * gemm.batch == 0 {
            return Err(DriverFailure::new(format!("a matrix has no elements: {gemm:?}")));
        }
        let sides = [(a, at.a), (b, at.b), (&gemm.d, at.d)].into_iter().chain(gemm.c.as_ref().map(|c| (c, at.c)));
        if sides.into_iter().any(|(side, at)| !at.is_multiple_of(u64::from(side.aligned))) {
            return Err(DriverFailure::new(format!("an address is not aligned as stated: {gemm:?}")));
        }
        if is_refused(gemm, at) {
            return Err(DriverFailure::not_supported(format!("CUBLAS_STATUS_NOT_SUPPORTED for {gemm:?}")));
        }
        self.submit(stream, StreamWork::Gemm(*gemm, at))
    }
}

/// Tells whether cuBLASLt has no algorithm for a product. Batches are a dimension of the grid, with strides that are
/// not negative. Epilogues are for sums in `f32`, and their vector is aligned. An operand that is summed has the summed
/// dimension as its slow one, and is the only matrix.
pub(crate) fn is_refused(gemm: &CublasGemm, at: GemmPlaces) -> bool {
    let is_summable = match gemm.epilogue {
        Epilogue::SumOfA => !gemm.a.transposed && gemm.batch == 1,
        Epilogue::SumOfB => gemm.b.transposed && gemm.batch == 1,
        Epilogue::Nothing | Epilogue::Bias => true,
    };
    let has_vector = gemm.epilogue != Epilogue::Nothing;
    gemm.batch > MOST_BATCHES
        || [&gemm.a, &gemm.b, &gemm.d].iter().any(|side| side.batch < 0)
        || has_vector && (gemm.dtype == DType::F64 || !at.vector.is_multiple_of(16))
        || !is_summable
}
