//! A driver that computes nothing and records which kernels are requested.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use numcore::DeviceBytes;
use parking_lot::Mutex;
use runtime_cuda::driver::{
    About, CapturedGraph, CublasGemm, CudaStream, Driver, Fallible, GemmPlaces, Grid, KernelArgs, KernelFunction,
    KernelSource, Mark,
};

use crate::{
    gpu::{self, without_hardware},
    memory::EmulatedMemory,
};

/// A list of the kernels that work would launch. All reads yield zeros.
pub(crate) struct Listing {
    about: About,
    memory: EmulatedMemory,
    sources: Mutex<Vec<KernelSource>>,
    /// Host memory, kept until the driver is dropped: a queue allocates only a few blocks.
    host: Mutex<Vec<Box<[u8]>>>,
    next: AtomicU64,
}

impl Listing {
    /// A list on a device without a limit on the sum of its allocations.
    pub(crate) fn new() -> Listing {
        Listing::with_memory(gpu::about().memory, EmulatedMemory::new(usize::MAX))
    }

    /// A list on a device of `bytes` bytes.
    pub(crate) fn of(bytes: usize) -> Listing {
        Listing::with_memory(bytes, EmulatedMemory::new(bytes))
    }

    fn with_memory(bytes: usize, memory: EmulatedMemory) -> Listing {
        Listing {
            about: About { memory: bytes, ..gpu::about() },
            memory,
            sources: Mutex::default(),
            host: Mutex::default(),
            // These values also serve as addresses, and none may be zero.
            next: AtomicU64::new(1),
        }
    }

    pub(crate) fn device_memory(&self) -> &EmulatedMemory {
        &self.memory
    }

    /// Takes the sources of the kernels requested so far, in order of their texts. Kernels of one text have one source.
    pub(crate) fn take_distinct(&self) -> Vec<KernelSource> {
        let mut sources = std::mem::take(&mut *self.sources.lock());
        sources.sort_by(|a, b| (&a.text, a.contracts, &a.entry).cmp(&(&b.text, b.contracts, &b.entry)));
        sources.dedup_by(|a, b| (&a.text, a.contracts) == (&b.text, b.contracts));
        sources
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn new_stream(&self) -> CudaStream {
        CudaStream(self.number())
    }
}

impl Driver for Listing {
    fn about(&self) -> &About {
        &self.about
    }

    fn memory(&self) -> Option<DeviceBytes> {
        Some(self.memory.bytes())
    }

    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>> {
        let pages = (bytes as u64).div_ceil(256).max(1);
        if bytes > self.about.memory {
            return Ok(None);
        }
        Ok(self.memory.allocate(bytes, || Some(self.next.fetch_add(pages, Ordering::Relaxed) * 256)))
    }

    // SAFETY: the trait's conditions, of which none is needed: no memory is touched.
    unsafe fn free(&self, _: &[CudaStream], addresses: &[u64]) {
        addresses.iter().for_each(|address| self.memory.release(*address));
    }

    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8> {
        let mut memory = vec![0u8; bytes].into_boxed_slice();
        let at = memory.as_mut_ptr();
        self.host.lock().push(memory);
        Ok(at)
    }

    // SAFETY: the trait's conditions, of which none is needed: no memory is touched.
    unsafe fn free_host(&self, _: *mut u8) {}

    without_hardware!();

    fn bind(&self) -> Fallible<()> {
        Ok(())
    }

    fn destroy_stream(&self, _: CudaStream) {}

    fn is_reached(&self, _: Mark) -> Fallible<bool> {
        Ok(true)
    }

    fn await_mark(&self, _: Mark) -> Fallible<()> {
        Ok(())
    }

    fn destroy_mark(&self, _: Mark) {}

    fn synchronize(&self, _: CudaStream) -> Fallible<()> {
        Ok(())
    }

    fn record(&self, _: Mark, _: CudaStream) -> Fallible<()> {
        Ok(())
    }

    fn wait(&self, _: CudaStream, _: Mark) -> Fallible<()> {
        Ok(())
    }

    // Captured work is listed like all other, and a replay needs no further kernels.
    fn begin_capture(&self, _: CudaStream) -> Fallible<()> {
        Ok(())
    }

    fn end_capture(&self, _: CudaStream) -> Fallible<CapturedGraph> {
        Ok(CapturedGraph(self.number()))
    }

    fn replay(&self, _: CapturedGraph, _: CudaStream) -> Fallible<()> {
        Ok(())
    }

    fn destroy_recording(&self, _: CapturedGraph) {}

    // SAFETY: the trait's conditions, of which none is needed: no memory is touched.
    unsafe fn copy_in(&self, _: CudaStream, _: u64, _: *const u8, _: usize) -> Fallible<()> {
        Ok(())
    }

    // SAFETY: the trait's conditions.
    unsafe fn copy_out(&self, _: CudaStream, to: *mut u8, _: u64, bytes: usize) -> Fallible<()> {
        // SAFETY: the caller's promise.
        unsafe { to.write_bytes(0, bytes) };
        Ok(())
    }

    // SAFETY: the trait's conditions, of which none is needed: no memory is touched.
    unsafe fn copy(&self, _: CudaStream, _: u64, _: u64, _: usize) -> Fallible<()> {
        Ok(())
    }

    // SAFETY: the trait's conditions, of which none is needed: no memory is touched.
    unsafe fn zero(&self, _: CudaStream, _: u64, _: usize) -> Fallible<()> {
        Ok(())
    }

    fn load(&self, source: &KernelSource, _: u32) -> Fallible<KernelFunction> {
        self.sources.lock().push(source.clone());
        Ok(KernelFunction(self.number()))
    }

    // SAFETY: the trait's conditions, of which none is needed: no memory is touched.
    unsafe fn launch(&self, _: CudaStream, _: KernelFunction, _: Grid, _: &mut KernelArgs) -> Fallible<()> {
        Ok(())
    }

    fn gemm_candidates(&self, _: &CublasGemm, _: u64, _: usize) -> Fallible<usize> {
        Ok(1)
    }

    // SAFETY: the trait's conditions, of which none is needed: no memory is touched.
    unsafe fn gemm(
        &self,
        _: CudaStream,
        _: &CublasGemm,
        _: GemmPlaces,
        _: (u64, usize),
        _: Option<usize>,
    ) -> Fallible<()> {
        Ok(())
    }
}
