//! What the rest of this crate asks of a GPU: about twenty calls. There is one implementation over the CUDA libraries, and one
//! that runs the same kernels on the host, for tests.

mod blas;
mod compile;
mod cuda;
#[cfg(feature = "emulate")]
mod emulated;
mod libraries;

use std::{ffi::c_void, fmt};

use crate::codegen::KernelSource;

pub(crate) use compile::{Architecture, Compiler};
pub(crate) use cuda::CudaDriver;
#[cfg(feature = "emulate")]
pub use emulated::Order;
#[cfg(feature = "emulate")]
pub(crate) use emulated::{Emulated, HostBuilder, Listing, Ordered};

/// What a driver reports: its own words.
#[derive(Debug)]
pub(crate) struct DriverFailure {
    pub message: String,
}

impl fmt::Display for DriverFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl DriverFailure {
    pub(crate) fn new(message: impl Into<String>) -> DriverFailure {
        DriverFailure { message: message.into() }
    }
}

pub(crate) type Fallible<T> = Result<T, DriverFailure>;

/// A queue of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream(pub u64);

/// A point in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(pub u64);

/// A kernel that can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelFunction(pub u64);

/// Recorded work that can be launched again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recording(pub u64);

/// How many threads a kernel gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Within the device's limits once a queue has looked at them.
    pub blocks: [usize; 3],
    /// Along the first two axes.
    pub threads: [u32; 2],
    /// Bytes of shared memory beyond what the kernel declares.
    pub shared: u32,
}

/// The device in numbers.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub name: String,
    pub processors: usize,
    /// Bytes of memory.
    pub memory: usize,
    /// Most bytes of shared memory a block may ask for.
    pub shared: usize,
}

/// A column-major product `D = op(A)·op(B) + β·D`, batch by batch. `m × n` is `D`'s size, `k` the inner one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CublasGemm {
    pub dtype: numcore::DType,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: GemmOperand,
    pub b: GemmOperand,
    pub d: GemmOperand,
    pub batch: usize,
    /// Whether the product is added to what is there.
    pub add: bool,
    /// Whether `f32` may be rounded to TF32 on its way in.
    pub tf32: bool,
}

/// A matrix of a product: elements between columns, between batches, and whether it is read transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GemmOperand {
    pub leading: usize,
    pub batch: isize,
    pub transposed: bool,
    /// Its address is a multiple of this many bytes (a power of two, 16 at most).
    pub aligned: u32,
}

/// A GPU.
///
/// # Safety
/// Methods are safe to call with handles this driver gave out and that were not destroyed; those that name memory are `unsafe` and
/// state what it must be.
pub(crate) trait Driver: Send + Sync {
    fn about(&self) -> &About;

    /// Memory aligned to 256; `None` when there is not enough.
    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>>;
    /// # Safety
    /// From [`alloc`](Driver::alloc), and no queued work uses it.
    unsafe fn free(&self, address: u64);
    /// Page-locked host memory.
    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8>;
    /// # Safety
    /// From [`alloc_host`](Driver::alloc_host), and no queued work uses it.
    unsafe fn free_host(&self, address: *mut u8);

    fn stream(&self) -> Fallible<Stream>;
    fn destroy_stream(&self, stream: Stream);
    fn synchronize(&self, stream: Stream) -> Fallible<()>;
    fn mark(&self) -> Fallible<Mark>;
    fn destroy_mark(&self, mark: Mark);
    fn record(&self, mark: Mark, stream: Stream) -> Fallible<()>;
    fn wait(&self, stream: Stream, mark: Mark) -> Fallible<()>;
    /// Blocks the host.
    fn await_mark(&self, mark: Mark) -> Fallible<()>;

    /// # Safety
    /// Both ranges are valid and stay so until the stream has passed.
    unsafe fn copy_in(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Fallible<()>;
    /// # Safety
    /// As for [`copy_in`](Driver::copy_in).
    unsafe fn copy_out(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Fallible<()>;
    /// Between two places of the device.
    ///
    /// # Safety
    /// As for [`copy_in`](Driver::copy_in); the ranges do not overlap.
    unsafe fn copy(&self, stream: Stream, to: u64, from: u64, bytes: usize) -> Fallible<()>;
    /// # Safety
    /// The range is valid.
    unsafe fn zero(&self, stream: Stream, at: u64, bytes: usize) -> Fallible<()>;

    /// Compiles and loads a kernel. `shared` is the most dynamic shared memory it will ask for.
    fn load(&self, source: &KernelSource, shared: u32) -> Fallible<KernelFunction>;
    /// # Safety
    /// `args` are what the kernel takes, and the memory they name is as its text requires.
    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: KernelFunction,
        grid: Grid,
        args: &mut [*mut c_void],
    ) -> Fallible<()>;
    /// # Safety
    /// Addresses of `a`, `b`, `d` and a workspace of this many bytes; matrices lie in their memory and `d` overlaps neither.
    unsafe fn gemm(&self, stream: Stream, gemm: &CublasGemm, at: [u64; 3], workspace: (u64, usize)) -> Fallible<()>;

    fn begin_capture(&self, stream: Stream) -> Fallible<()>;
    fn end_capture(&self, stream: Stream) -> Fallible<Recording>;
    fn replay(&self, recording: Recording, stream: Stream) -> Fallible<()>;
    fn destroy_recording(&self, recording: Recording);
}
