//! An emulated GPU: kernel sources compiled by a C++ compiler against the emulator of `kernels/shim`, one fiber per
//! thread.
//!
//! Memory is host memory, calls are synchronous, and GEMM is a plain loop with cuBLASLt's restrictions. The emulator
//! tests everything except the hardware: plans, arguments, index arithmetic, the kernels' logic, memory and errors.

mod access_order;
mod build;
mod candidates;
mod captures;
mod listing;
mod memory;
mod ordered;
mod parameters;
mod product;
mod refusal;
mod tracked_block;
mod tracked_memory;
mod travelling;
mod vector_clock;

use std::{
    alloc::{self, Layout},
    collections::HashMap,
    ffi::c_void,
    path::Path,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use libloading::Library;
use numcore::{DType, DeviceBytes};
use parking_lot::Mutex;

use super::{
    About, CublasGemm, Driver, DriverFailure, Fallible, GemmOperand, GemmPlaces, Grid, KernelFunction, Mark, Recording,
    Stream,
    capture_gate::{CaptureGate, Freed},
};
use crate::{args::Args, codegen::KernelSource};

pub use access_order::AccessOrder;
pub(crate) use build::{HostBuilder, for_each};
pub use candidates::GemmCandidates;
use captures::{CapturedWork, Captures};
pub(crate) use listing::Listing;
pub use memory::EmulatedMemory;
pub(crate) use ordered::Ordered;
use product::product;
pub use refusal::GemmRefusal;

/// A kernel's entry. Its arguments: the grid, threads, shared memory and order of a launch; pointers to the kernel's
/// arguments.
type EntryFn = unsafe extern "C" fn(*const u32, *mut *mut c_void);

/// The host as a GPU.
pub(crate) struct Emulated {
    about: About,
    memory: EmulatedMemory,
    builder: HostBuilder,
    kernels: Mutex<Kernels>,
    next: AtomicU64,
    blocks: Mutex<HashMap<u64, Layout>>,
    captures: Captures,
    gate: CaptureGate,
}

/// Held while a kernel runs: a library's state is global, and emulated GPUs of one process share libraries.
static RUNNING: Mutex<()> = Mutex::new(());

/// The most matrices of one product that the library takes.
const MOST_BATCHES: usize = 65_535;

#[derive(Default)]
struct Kernels {
    loaded: Vec<(Library, EntryFn)>,
    launches: u32,
}

pub(super) fn about() -> About {
    About { name: "emulated on the host".into(), processors: 1, memory: 8 << 30, shared: 163 << 10 }
}

impl Emulated {
    /// Creates an emulated GPU that keeps compiled kernels in `folder`.
    pub(crate) fn new(folder: &Path) -> Fallible<Emulated> {
        let builder = HostBuilder::new(folder)?;
        let (kernels, blocks) = (Mutex::default(), Mutex::default());
        Ok(Emulated {
            about: about(),
            memory: EmulatedMemory::new(about().memory),
            builder,
            kernels,
            next: AtomicU64::new(1),
            blocks,
            captures: Captures::default(),
            gate: CaptureGate::default(),
        })
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn allocate(&self, bytes: usize) -> Option<u64> {
        let layout = Layout::from_size_align(bytes.max(1), 256).ok()?;
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc::alloc(layout) };
        if at.is_null() {
            return None;
        }
        // SAFETY: just allocated with this size. Filled with NaN, so that a read of uninitialized memory shows.
        unsafe { at.write_bytes(0xff, bytes) };
        self.blocks.lock().insert(at as u64, layout);
        Some(at as u64)
    }

    fn release(&self, at: u64) {
        self.memory.release(at);
        if let Some(layout) = self.blocks.lock().remove(&at) {
            // SAFETY: allocated with this layout.
            unsafe { alloc::dealloc(at as *mut u8, layout) };
        }
    }
}

/// Streams and marks of a driver that does its work at once.
macro_rules! at_once {
    () => {
        fn stream(&self) -> Fallible<Stream> {
            Ok(Stream(self.number()))
        }

        fn priority_stream(&self) -> Fallible<Stream> {
            self.stream()
        }

        fn bind(&self) -> Fallible<()> {
            Ok(())
        }

        fn is_reached(&self, _: Mark) -> Fallible<bool> {
            Ok(true)
        }

        fn destroy_stream(&self, _: Stream) {}

        fn mark(&self) -> Fallible<Mark> {
            Ok(Mark(self.number()))
        }

        /// Creates a mark that is recorded and reached at once.
        fn timed_mark(&self) -> Fallible<Mark> {
            static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
            Ok(Mark(ORIGIN.elapsed().as_nanos() as u64))
        }

        fn elapsed(&self, from: Mark, to: Mark) -> Fallible<Duration> {
            Ok(Duration::from_nanos(to.0.saturating_sub(from.0)))
        }

        fn destroy_mark(&self, _: Mark) {}

        fn await_mark(&self, _: Mark) -> Fallible<()> {
            Ok(())
        }
    };
}
use at_once;

impl Driver for Emulated {
    fn about(&self) -> &About {
        &self.about
    }

    fn memory(&self) -> Option<DeviceBytes> {
        Some(self.memory.bytes())
    }

    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>> {
        let _outside = self.gate.enter("allocate memory")?;
        Ok(self.memory.allocate(bytes, || self.allocate(bytes)))
    }

    // SAFETY: the trait's conditions; a map records the allocations.
    unsafe fn free(&self, address: u64) {
        let Some(_outside) = self.gate.enter_or_defer(Freed::Device(address)) else { return };
        self.release(address);
    }

    // SAFETY: the trait's conditions.
    unsafe fn free_after(&self, stream: Stream, addresses: &[u64]) {
        // In a captured step of this thread there is no guard, and `free` defers its address.
        let _outside = self.gate.enter("free memory");
        // On a failed stream nothing runs any more.
        let _ = self.synchronize(stream);
        // SAFETY: the caller's promise; the stream has passed.
        addresses.iter().for_each(|address| unsafe { self.free(*address) });
    }

    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8> {
        let _outside = self.gate.enter("allocate memory")?;
        self.allocate(bytes).map(|at| at as *mut u8).ok_or_else(|| DriverFailure::new("out of memory"))
    }

    // SAFETY: as above.
    unsafe fn free_host(&self, address: *mut u8) {
        let Some(_outside) = self.gate.enter_or_defer(Freed::Host(address as u64)) else { return };
        self.release(address as u64);
    }

    at_once!();

    fn synchronize(&self, stream: Stream) -> Fallible<()> {
        self.captures.synchronize(stream)
    }

    fn record(&self, mark: Mark, stream: Stream) -> Fallible<()> {
        self.captures.record(mark, stream);
        Ok(())
    }

    fn wait(&self, stream: Stream, mark: Mark) -> Fallible<()> {
        self.captures.wait(stream, mark)
    }

    fn begin_capture(&self, stream: Stream) -> Fallible<()> {
        self.gate.begin()?;
        self.captures.begin(stream);
        Ok(())
    }

    fn end_capture(&self, stream: Stream) -> Fallible<Recording> {
        let recording = self.captures.end(stream, Recording(self.number()));
        for freed in self.gate.end() {
            match freed {
                Freed::Device(address) | Freed::Host(address) => self.release(address),
            }
        }
        recording
    }

    fn replay(&self, recording: Recording, stream: Stream) -> Fallible<()> {
        for work in self.captures.recording(recording).iter() {
            // SAFETY: the memory that captured work uses lives as long as its recording, by the caller's promise when
            // it was captured.
            unsafe {
                match work.clone() {
                    CapturedWork::Launch(kernel, grid, mut args) => self.launch(stream, kernel, grid, &mut args)?,
                    CapturedWork::Gemm(gemm, at, workspace) => self.gemm(stream, &gemm, at, workspace, None)?,
                    CapturedWork::Copy { to, from, bytes } => self.copy(stream, to, from, bytes)?,
                    CapturedWork::Zero { at, bytes } => self.zero(stream, at, bytes)?,
                }
            }
        }
        Ok(())
    }

    fn destroy_recording(&self, recording: Recording) {
        self.captures.forget(recording);
    }

    // SAFETY: as above; on the host a copy is done at once.
    unsafe fn copy_in(&self, _: Stream, to: u64, from: *const u8, bytes: usize) -> Fallible<()> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn copy_out(&self, _: Stream, to: *mut u8, from: u64, bytes: usize) -> Fallible<()> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, bytes) };
        Ok(())
    }

    unsafe fn copy(&self, stream: Stream, to: u64, from: u64, bytes: usize) -> Fallible<()> {
        if self.captures.keep(stream, || CapturedWork::Copy { to, from, bytes }) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn zero(&self, stream: Stream, at: u64, bytes: usize) -> Fallible<()> {
        if self.captures.keep(stream, || CapturedWork::Zero { at, bytes }) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { (at as *mut u8).write_bytes(0, bytes) };
        Ok(())
    }

    fn load(&self, source: &KernelSource, _: u32) -> Fallible<KernelFunction> {
        let (path, symbol) = self.builder.library(source)?;
        let _outside = self.gate.enter("load a kernel")?;
        let words = |e: libloading::Error| DriverFailure::new(format!("{}: {e}", path.display()));
        // SAFETY: the library was compiled above; loading it runs constructors of the emulator alone.
        let library = unsafe { Library::new(&path) }.map_err(words)?;
        // SAFETY: this is the entry's type.
        let entry = *unsafe { library.get::<EntryFn>(symbol.as_bytes()) }.map_err(words)?;
        let mut kernels = self.kernels.lock();
        kernels.loaded.push((library, entry));
        Ok(KernelFunction(kernels.loaded.len() as u64 - 1))
    }

    // SAFETY: the trait's conditions, which the entry relies on as a kernel does.
    unsafe fn launch(&self, stream: Stream, kernel: KernelFunction, grid: Grid, args: &mut Args) -> Fallible<()> {
        let [x, y, z] = grid.blocks.map(|b| b as u32);
        if grid.threads[0] * grid.threads[1] > 1024 || y > 65_535 || z > 65_535 || x * y * z == 0 || x > i32::MAX as u32
        {
            return Err(DriverFailure::new(format!("a launch beyond the device's limits: {grid:?}")));
        }
        if self.captures.keep(stream, || CapturedWork::Launch(kernel, grid, Box::new(args.clone()))) {
            return Ok(());
        }
        let (entry, order) = {
            let mut kernels = self.kernels.lock();
            kernels.launches = kernels.launches.wrapping_add(1);
            (kernels.loaded[kernel.0 as usize].1, kernels.launches % 3)
        };
        // Threads run in another order at every launch.
        let at = [x, y, z, grid.threads[0], grid.threads[1], grid.shared, order];
        let _one = RUNNING.lock();
        // SAFETY: the caller's promise.
        unsafe { entry(at.as_ptr(), args.pointers().as_mut_ptr()) };
        Ok(())
    }

    fn gemm_candidates(&self, _: &CublasGemm, _: u64, _: usize) -> Fallible<usize> {
        Ok(1)
    }

    // SAFETY: the trait's conditions.
    unsafe fn gemm(
        &self,
        stream: Stream,
        gemm: &CublasGemm,
        at: GemmPlaces,
        workspace: (u64, usize),
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
        // Batches are a dimension of the grid, with strides that are not negative. Epilogues are for sums in `f32`, of
        // an aligned vector.
        let refused = gemm.batch > MOST_BATCHES
            || [a, b, &gemm.d].iter().any(|side| side.batch < 0)
            || gemm.bias && (gemm.dtype == DType::F64 || !at.bias.is_multiple_of(16));
        if refused {
            return Err(DriverFailure::not_supported(format!("CUBLAS_STATUS_NOT_SUPPORTED for {gemm:?}")));
        }
        if self.captures.keep(stream, || CapturedWork::Gemm(*gemm, at, workspace)) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe {
            match (gemm.dtype, gemm.into) {
                (DType::F64, _) => product::<f64, f64>(gemm, at),
                (DType::F32, _) => product::<f32, f32>(gemm, at),
                (DType::F16, DType::F32) => product::<half::f16, f32>(gemm, at),
                (DType::F16, _) => product::<half::f16, half::f16>(gemm, at),
                (_, DType::F32) => product::<half::bf16, f32>(gemm, at),
                _ => product::<half::bf16, half::bf16>(gemm, at),
            }
        }
        Ok(())
    }
}
