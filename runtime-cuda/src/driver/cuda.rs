//! A GPU through the CUDA driver API.
//!
//! This module uses cudarc's raw interface. Its safe layer tracks an event per buffer, which costs more than a launch,
//! while here one stream's order is all a buffer needs.

use std::time::Duration;

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};

use numcore::DeviceBytes;

use super::{
    About, Architecture, CapturedGraph, Compiler, CublasGemm, CudaStream, Driver, DriverFailure, Fallible, GemmPlaces,
    Grid, KernelArgs, KernelFunction, KernelSource, LoadedModules, Mark,
    blas::Blas,
    capture_gate::{CaptureGate, Freed, relaxed},
    function::function,
    libraries, queries,
};

/// The oldest major compute capability: kernels of halves use its instructions.
const OLDEST_CAPABILITY: i32 = 8;

/// One GPU through the CUDA driver API.
pub(crate) struct CudaDriver {
    device: sys::CUdevice,
    context: sys::CUcontext,
    about: About,
    compiler: Compiler,
    modules: LoadedModules<sys::CUmodule>,
    blas: Blas,
    gate: CaptureGate,
}

// SAFETY: the driver's handles may be used from any thread; the context is made current before each use.
unsafe impl Send for CudaDriver {}
// SAFETY: as above; the driver synchronizes access to shared state.
unsafe impl Sync for CudaDriver {}

pub(super) fn words(e: DriverError) -> DriverFailure {
    DriverFailure::of_code(e.0 as u32, e.to_string())
}

impl CudaDriver {
    /// Opens the GPU with index `index`, by its primary context. The error names the missing part of the machine.
    pub(crate) fn new(index: u32) -> Fallible<CudaDriver> {
        libraries::device()?;
        result::init().map_err(words)?;
        let count = result::device::get_count().map_err(words)?;
        let Some(ordinal) = i32::try_from(index).ok().filter(|i| *i < count) else {
            return Err(DriverFailure::new(format!("there is no GPU {index}; the driver sees {count}")));
        };
        let device = result::device::get(ordinal).map_err(words)?;
        let name = result::device::get_name(device).map_err(words)?;
        use sys::CUdevice_attribute_enum as Attribute;
        let attribute = |which| {
            // SAFETY: the device is valid.
            unsafe { result::device::get_attribute(device, which) }.map_err(words)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        // SAFETY: the device is valid.
        let memory = unsafe { result::device::total_mem(device) }.map_err(words)?;
        if major < OLDEST_CAPABILITY {
            let why = format!(
                "{name} has compute capability {major}.{minor}; kernels need {OLDEST_CAPABILITY}.0 (Ampere) or newer"
            );
            return Err(DriverFailure::new(why));
        }
        let mut version = 0;
        // SAFETY: the pointer is valid.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(words)?;
        let architecture = Architecture((major * 10 + minor) as u32);
        let compiler = Compiler::new(architecture, Some(version / 1000), Compiler::cache_folder());
        // SAFETY: the device is valid.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(words)?;
        // SAFETY: the context was just retained.
        let blas = unsafe { result::ctx::set_current(context) }.map_err(words).and_then(|()| Blas::new());
        let blas = blas.inspect_err(|_| {
            // SAFETY: retained above, and not used any more.
            let _ = unsafe { result::primary_ctx::release(device) };
        })?;
        let about = About { name, processors, memory, shared };
        let (modules, gate) = (LoadedModules::default(), CaptureGate::default());
        Ok(CudaDriver { device, context, about, compiler, modules, blas, gate })
    }
}

impl CudaDriver {
    /// Frees device memory; in a captured step, after the capture.
    ///
    /// # Safety
    /// The address is from [`alloc`](Driver::alloc), and no queued work uses it.
    unsafe fn free_address(&self, address: u64) {
        let Some(_outside) = self.gate.enter_or_defer(Freed::Device(address)) else { return };
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    /// Ends a capture at the gate, and frees the memory that was dropped during it.
    fn leave_capture(&self) {
        for freed in self.gate.end() {
            // SAFETY: the caller that freed it promised that no queued work uses it.
            unsafe {
                match freed {
                    Freed::Device(address) => self.free_address(address),
                    Freed::Host(address) => self.free_host(address as usize as *mut u8),
                }
            }
        }
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            self.blas.destroy();
        }
        // SAFETY: retained in `new`; all objects created in it refer to `self` and are dropped.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl Mark {
    fn raw(self) -> sys::CUevent {
        self.0 as usize as sys::CUevent
    }
}

impl Driver for CudaDriver {
    fn about(&self) -> &About {
        &self.about
    }

    fn memory(&self) -> Option<DeviceBytes> {
        self.bind().ok()?;
        let (free, capacity) = result::mem_get_info().ok()?;
        Some(DeviceBytes { capacity, free })
    }

    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>> {
        let _outside = self.gate.enter("allocate memory")?;
        self.bind()?;
        // SAFETY: the contents are arbitrary by contract.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => Ok(Some(address)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(e) => Err(words(e)),
        }
    }

    unsafe fn free(&self, streams: &[CudaStream], addresses: &[u64]) {
        // No guard in a captured step of this thread: the addresses are freed after it. A failed stream runs nothing.
        let _outside = self.gate.enter("free memory");
        streams.iter().for_each(|stream| drop(self.synchronize(*stream)));
        // SAFETY: the caller's promise; the streams have passed.
        addresses.iter().for_each(|address| unsafe { self.free_address(*address) });
    }

    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8> {
        let _outside = self.gate.enter("allocate memory")?;
        self.bind()?;
        // SAFETY: every reader writes it first. No flags: write-combined memory is slow to read.
        unsafe { result::malloc_host(bytes, 0) }.map(|p| p.cast()).map_err(words)
    }

    unsafe fn free_host(&self, address: *mut u8) {
        let Some(_outside) = self.gate.enter_or_defer(Freed::Host(address as u64)) else { return };
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { result::free_host(address.cast()) };
        }
    }

    fn bind(&self) -> Fallible<()> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }.map_err(words)
    }

    fn priority_stream(&self) -> Fallible<CudaStream> {
        self.bind()?;
        let (mut least, mut greatest, mut stream) = (0, 0, std::ptr::null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: pointers are valid; lower numbers go first.
        unsafe {
            sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest).result().map_err(words)?;
            sys::cuStreamCreateWithPriority(&mut stream, flags, greatest).result().map_err(words)?;
        }
        Ok(CudaStream(stream as usize as u64))
    }

    fn stream(&self) -> Fallible<CudaStream> {
        self.bind()?;
        result::stream::create(result::stream::StreamKind::NonBlocking)
            .map(|s| CudaStream(s as usize as u64))
            .map_err(words)
    }

    fn destroy_stream(&self, stream: CudaStream) {
        if self.bind().is_ok() {
            // SAFETY: it was created and is not used any more.
            let _ = unsafe { result::stream::destroy(stream.raw()) };
        }
    }

    fn synchronize(&self, stream: CudaStream) -> Fallible<()> {
        self.bind()?;
        // SAFETY: a stream of this driver.
        relaxed(|| unsafe { result::stream::synchronize(stream.raw()) }).map_err(words)
    }

    fn mark(&self) -> Fallible<Mark> {
        self.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        event.map(|e| Mark(e as usize as u64)).map_err(words)
    }

    fn timed_mark(&self) -> Fallible<Mark> {
        self.bind()?;
        // A thread that waits for it does nothing else, and should not spin meanwhile.
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        event.map(|e| Mark(e as usize as u64)).map_err(words)
    }

    fn elapsed(&self, from: Mark, to: Mark) -> Fallible<Duration> {
        self.bind()?;
        // SAFETY: handles of this driver.
        let milliseconds = unsafe { queries::elapsed(from.raw(), to.raw()) }?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    fn destroy_mark(&self, mark: Mark) {
        if self.bind().is_ok() {
            // SAFETY: it was created and is not used any more.
            let _ = unsafe { result::event::destroy(mark.raw()) };
        }
    }

    fn record(&self, mark: Mark, stream: CudaStream) -> Fallible<()> {
        self.bind()?;
        // SAFETY: handles of this driver.
        unsafe { result::event::record(mark.raw(), stream.raw()) }.map_err(words)
    }

    fn wait(&self, stream: CudaStream, mark: Mark) -> Fallible<()> {
        self.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: handles of this driver.
        unsafe { result::stream::wait_event(stream.raw(), mark.raw(), flags) }.map_err(words)
    }

    fn is_reached(&self, mark: Mark) -> Fallible<bool> {
        self.bind()?;
        // SAFETY: a handle of this driver.
        match relaxed(|| unsafe { result::event::query(mark.raw()) }) {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(e) => Err(words(e)),
        }
    }

    fn await_mark(&self, mark: Mark) -> Fallible<()> {
        self.bind()?;
        // SAFETY: a handle of this driver.
        relaxed(|| unsafe { result::event::synchronize(mark.raw()) }).map_err(words)
    }

    unsafe fn copy_in(&self, stream: CudaStream, to: u64, from: *const u8, bytes: usize) -> Fallible<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.raw()) }.result().map_err(words)
    }

    unsafe fn copy_out(&self, stream: CudaStream, to: *mut u8, from: u64, bytes: usize) -> Fallible<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.raw()) }.result().map_err(words)
    }

    unsafe fn copy(&self, stream: CudaStream, to: u64, from: u64, bytes: usize) -> Fallible<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.raw()) }.result().map_err(words)
    }

    unsafe fn zero(&self, stream: CudaStream, at: u64, bytes: usize) -> Fallible<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(at, 0, bytes, stream.raw()) }.map_err(words)
    }

    fn load(&self, source: &KernelSource, shared: u32) -> Fallible<KernelFunction> {
        let _outside = self.gate.enter("load a kernel")?;
        self.bind()?;
        let named = |e: DriverFailure| e.within(&format!("kernel {}", source.entry));
        let module = self.modules.get_or_load(source, || {
            let code = self.compiler.compile(source)?;
            // SAFETY: machine code as the compiler gave it. The context frees the module.
            unsafe { result::module::load_data(code.as_ptr().cast()) }.map_err(|e| named(words(e)))
        })?;
        // SAFETY: the module was loaded in this context, and is never unloaded.
        unsafe { function(module, &source.entry, shared) }.map_err(named)
    }

    unsafe fn launch(
        &self,
        stream: CudaStream,
        kernel: KernelFunction,
        grid: Grid,
        args: &mut KernelArgs,
    ) -> Fallible<()> {
        self.bind()?;
        let mut args = args.pointers();
        let ([x, y, z], [tx, ty]) = (grid.blocks.map(|b| b as u32), grid.threads);
        let function = kernel.0 as usize as sys::CUfunction;
        // SAFETY: the caller's promise.
        unsafe {
            result::launch_kernel(function, (x, y, z), (tx, ty, 1), grid.shared, stream.raw(), &mut args).map_err(words)
        }
    }

    fn gemm_candidates(&self, gemm: &CublasGemm, vector: u64, workspace: usize) -> Fallible<usize> {
        self.bind()?;
        self.blas.candidates(gemm, vector, workspace)
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
        self.bind()?;
        // SAFETY: the caller's promise.
        let queued = unsafe { self.blas.gemm(stream, gemm, at, workspace, candidate) };
        // SAFETY: a stream of this driver.
        queued.map_err(|failure| unsafe { queries::fault(stream.raw(), &failure) }.unwrap_or(failure))
    }

    fn begin_capture(&self, stream: CudaStream) -> Fallible<()> {
        self.bind()?;
        // Other threads may continue to queue work: only this stream's is captured. Calls that would invalidate it wait
        // at the gate.
        self.gate.begin()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of this driver.
        let begun = unsafe { result::stream::begin_capture(stream.raw(), mode) }.map_err(words);
        begun.inspect_err(|_| self.leave_capture())
    }

    fn end_capture(&self, stream: CudaStream) -> Fallible<CapturedGraph> {
        // SAFETY: a stream of this driver that is being captured.
        let end = |()| unsafe { result::stream::end_capture(stream.raw()) }.map_err(words);
        let graph = self.bind().and_then(end);
        // The capture ends even after an error: other threads wait.
        self.leave_capture();
        let graph = graph?;
        if graph.is_null() {
            return Err(DriverFailure::new("the capture was invalidated"));
        }
        let mut recording = std::ptr::null_mut();
        // Communication keeps the priority of its stream.
        let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
        // SAFETY: the graph was just made and is destroyed once it is instantiated.
        let made = unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&mut recording, graph, flags.0.into()).result();
            let _ = result::graph::destroy(graph);
            made
        };
        made.map_err(words)?;
        Ok(CapturedGraph(recording as usize as u64))
    }

    fn replay(&self, recording: CapturedGraph, stream: CudaStream) -> Fallible<()> {
        self.bind()?;
        // SAFETY: handles of this driver.
        unsafe { result::graph::launch(recording.0 as usize as sys::CUgraphExec, stream.raw()) }.map_err(words)
    }

    fn destroy_recording(&self, recording: CapturedGraph) {
        if self.bind().is_ok() {
            // SAFETY: it was made by `end_capture` and is not used any more.
            let _ = unsafe { result::graph::exec_destroy(recording.0 as usize as sys::CUgraphExec) };
        }
    }
}
