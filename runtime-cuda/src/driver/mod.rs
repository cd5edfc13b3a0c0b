//! The driver interface that the rest of this crate uses: about twenty calls. There is one implementation over the CUDA
//! libraries, and one that runs the kernels on the host, for tests.

mod blas;
mod capture_gate;
mod compile;
mod cuda;
#[cfg(feature = "emulate")]
mod emulated;
mod failure;
mod libraries;

use std::{fmt, time::Duration};

use numcore::DeviceBytes;

use crate::{args::Args, codegen::KernelSource};

pub(crate) use compile::{Architecture, Compiler};
pub(crate) use cuda::CudaDriver;
#[cfg(feature = "emulate")]
pub use emulated::{AccessOrder, EmulatedMemory, GemmCandidates, GemmRefusal};
#[cfg(feature = "emulate")]
pub(crate) use emulated::{Emulated, HostBuilder, Listing, Ordered};
pub(crate) use failure::{DriverFailure, DriverFailureKind};

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

/// A captured graph that can be launched repeatedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recording(pub u64);

/// How many threads a kernel gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// The grid size; a queue checks it against the device's limits.
    pub blocks: [usize; 3],
    /// The block size along the first two axes.
    pub threads: [u32; 2],
    /// Bytes of dynamic shared memory beyond the kernel's static declarations.
    pub shared: u32,
}

/// The properties of the device.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub name: String,
    pub processors: usize,
    /// Bytes of device memory.
    pub memory: usize,
    /// The most bytes of shared memory that a block may use.
    pub shared: usize,
}

/// A column-major GEMM `D = op(A)·op(B)`, plus what is added to it, batch by batch; all of it is rounded once. `D` is
/// `m × n`, and `k` is the inner size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CublasGemm {
    /// The type of `A` and `B`.
    pub dtype: numcore::DType,
    /// The type of `C` and `D`.
    pub into: numcore::DType,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: GemmOperand,
    pub b: GemmOperand,
    pub d: GemmOperand,
    /// What is added to the product, in place of `D` itself.
    pub c: Option<GemmOperand>,
    /// Whether a vector, of which an element is for each row of `D`, is added to every column.
    pub bias: bool,
    pub batch: usize,
    /// Whether the GEMM accumulates into `D`.
    pub add: bool,
    /// Whether `f32` operands may be rounded to TF32.
    pub tf32: bool,
}

impl CublasGemm {
    /// Elements from the first to the last of the output.
    pub(crate) fn output_elements(&self) -> usize {
        (self.batch - 1) * self.d.batch.unsigned_abs() + (self.n - 1) * self.d.leading + self.m
    }

    /// The addresses that it reads.
    #[cfg(feature = "emulate")]
    pub(crate) fn reads(&self, at: GemmPlaces) -> impl Iterator<Item = u64> {
        let added = [self.c.map(|_| at.c), self.bias.then_some(at.bias)];
        [at.a, at.b].into_iter().chain(added.into_iter().flatten())
    }
}

/// As the caller of the row-major product sees it: `[rows, inner] x [inner, columns]`, a `t` after a transposed operand.
impl fmt::Display for CublasGemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CublasGemm { m, n, k, batch, dtype, into, .. } = *self;
        let turned = |operand: GemmOperand| if operand.transposed { "t" } else { "" };
        write!(f, "[{n}, {k}]{} x [{k}, {m}]{} {dtype} -> {into}", turned(self.b), turned(self.a))?;
        if batch > 1 {
            write!(f, ", {batch} of them")?;
        }
        let added = [("added", self.add), ("with a bias", self.bias), ("with a residual", self.c.is_some())];
        added.iter().filter(|(_, is)| *is).try_for_each(|(words, _)| write!(f, ", {words}"))
    }
}

/// Where the matrices of a GEMM are; `c` and `bias` where it has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GemmPlaces {
    pub a: u64,
    pub b: u64,
    pub d: u64,
    pub c: u64,
    pub bias: u64,
}

/// An operand of a GEMM: elements between columns, between batches, and whether it is read transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GemmOperand {
    pub leading: usize,
    pub batch: isize,
    pub transposed: bool,
    /// The alignment of the address in bytes (a power of two, 16 at most).
    pub aligned: u32,
}

/// A GPU.
///
/// # Safety
/// Methods are safe to call with handles that this driver created and that were not destroyed; those that name memory
/// are `unsafe` and state what it must be.
pub(crate) trait Driver: Send + Sync {
    fn about(&self) -> &About;

    /// The device's memory as the driver knows it, where it says.
    fn memory(&self) -> Option<DeviceBytes>;
    /// Allocates memory aligned to 256 bytes; `None` when there is not enough.
    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>>;
    /// # Safety
    /// From [`alloc`](Driver::alloc), and no queued work uses it.
    unsafe fn free(&self, address: u64);
    /// A pool uses this range of an allocation as one block from now on. For what watches accesses of memory.
    fn note_block(&self, address: u64, bytes: usize) {
        let _ = (address, bytes);
    }
    /// Waits for a stream and frees memory; no capture begins meanwhile. Frees synchronise the device, so they are done together.
    ///
    /// # Safety
    /// From [`alloc`](Driver::alloc), and no work uses it but the stream's.
    unsafe fn free_after(&self, stream: Stream, addresses: &[u64]);
    /// Allocates page-locked host memory.
    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8>;
    /// # Safety
    /// From [`alloc_host`](Driver::alloc_host), and no queued work uses it.
    unsafe fn free_host(&self, address: *mut u8);

    /// Makes the device's context this thread's, for calls of another library.
    fn bind(&self) -> Fallible<()>;

    fn stream(&self) -> Fallible<Stream>;
    /// A stream whose work goes before that of others.
    fn priority_stream(&self) -> Fallible<Stream>;
    fn destroy_stream(&self, stream: Stream);
    fn synchronize(&self, stream: Stream) -> Fallible<()>;
    fn mark(&self) -> Fallible<Mark>;
    /// A mark that knows when it was reached.
    fn timed_mark(&self) -> Fallible<Mark>;
    /// How long after one timed mark another was reached; both were waited for.
    fn elapsed(&self, from: Mark, to: Mark) -> Fallible<Duration>;
    fn destroy_mark(&self, mark: Mark);
    fn record(&self, mark: Mark, stream: Stream) -> Fallible<()>;
    fn wait(&self, stream: Stream, mark: Mark) -> Fallible<()>;
    /// Whether the mark is reached; one that was never recorded is.
    fn is_reached(&self, mark: Mark) -> Fallible<bool>;
    /// Blocks the host until the mark is reached.
    fn await_mark(&self, mark: Mark) -> Fallible<()>;

    /// # Safety
    /// Both ranges are valid and stay so until the stream has passed.
    unsafe fn copy_in(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Fallible<()>;
    /// # Safety
    /// As for [`copy_in`](Driver::copy_in).
    unsafe fn copy_out(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Fallible<()>;
    /// Copies between two ranges of device memory.
    ///
    /// # Safety
    /// As for [`copy_in`](Driver::copy_in); the ranges do not overlap.
    unsafe fn copy(&self, stream: Stream, to: u64, from: u64, bytes: usize) -> Fallible<()>;
    /// # Safety
    /// The range is valid.
    unsafe fn zero(&self, stream: Stream, at: u64, bytes: usize) -> Fallible<()>;

    /// Compiles and loads a kernel. `shared` is the most dynamic shared memory that a launch will use.
    fn load(&self, source: &KernelSource, shared: u32) -> Fallible<KernelFunction>;
    /// # Safety
    /// `args` are the kernel's parameters, and the memory they point to is as its source requires.
    unsafe fn launch(&self, stream: Stream, kernel: KernelFunction, grid: Grid, args: &mut Args) -> Fallible<()>;
    /// How many algorithms there are to choose among for a GEMM with a bias there and a workspace of this many bytes.
    fn gemm_candidates(&self, gemm: &CublasGemm, bias: u64, workspace: usize) -> Fallible<usize>;
    /// By the candidate of this number, or by what the library would choose.
    ///
    /// # Safety
    /// Addresses of what the GEMM has, and a workspace of this many bytes; matrices are inside their memory and `d`
    /// overlaps none of the others.
    unsafe fn gemm(
        &self,
        stream: Stream,
        gemm: &CublasGemm,
        at: GemmPlaces,
        workspace: (u64, usize),
        candidate: Option<usize>,
    ) -> Fallible<()>;

    fn begin_capture(&self, stream: Stream) -> Fallible<()>;
    fn end_capture(&self, stream: Stream) -> Fallible<Recording>;
    fn replay(&self, recording: Recording, stream: Stream) -> Fallible<()>;
    fn destroy_recording(&self, recording: Recording);
}
