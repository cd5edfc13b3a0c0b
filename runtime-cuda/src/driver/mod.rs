//! The driver interface that the rest of this crate uses, [`Driver`]: about thirty calls. `CudaDriver` implements it
//! over the CUDA libraries. Another driver makes a [`Cuda`](crate::Cuda) of its own
//! ([`Cuda::apart`](crate::Cuda::apart)): one for tests runs the kernels on the host.

mod args;
mod blas;
mod capture_gate;
mod compile;
mod cuda;
mod failure;
mod function;
mod libraries;
mod modules;
mod queries;

use std::{fmt, time::Duration};

use numcore::DeviceBytes;

pub use crate::codegen::KernelSource;
pub use args::KernelArgs;
pub(crate) use args::LIMIT;
pub use capture_gate::{CallGuard, CaptureGate, Freed};
pub use compile::{Architecture, Compiler};
pub(crate) use cuda::CudaDriver;
pub(crate) use failure::backend;
pub use failure::{DriverFailure, DriverFailureKind};
pub use modules::LoadedModules;

/// The result of a driver call.
pub type Fallible<T> = Result<T, DriverFailure>;

/// A stream of the device: one ordered queue of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaStream(
    /// The driver's handle.
    pub u64,
);

impl CudaStream {
    pub(super) fn raw(self) -> cudarc::driver::sys::CUstream {
        self.0 as usize as cudarc::driver::sys::CUstream
    }
}

/// A point in a stream: a CUDA event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(
    /// The driver's handle.
    pub u64,
);

/// A loaded kernel that can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelFunction(
    /// The driver's handle.
    pub u64,
);

/// A captured graph that can be launched repeatedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapturedGraph(
    /// The driver's handle.
    pub u64,
);

/// The numbers of blocks and threads of a launch, and its shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The grid size; a queue checks it against the device's limits.
    pub blocks: [usize; 3],
    /// The block size along the first two axes.
    pub threads: [u32; 2],
    /// Bytes of dynamic shared memory beyond the kernel's static declarations.
    pub shared: u32,
}

/// The properties of the device.
#[derive(Clone, Debug)]
pub struct About {
    /// The name of the device.
    pub name: String,
    /// The number of multiprocessors.
    pub processors: usize,
    /// Bytes of device memory.
    pub memory: usize,
    /// The most bytes of shared memory that a block may use.
    pub shared: usize,
}

/// A batched column-major GEMM `D = op(A)·op(B)`, plus optional addends, rounded once. `D` is `m × n`, and `k` is the
/// inner size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CublasGemm {
    /// The type of `A` and `B`.
    pub dtype: numcore::DType,
    /// The type of `C` and `D`.
    pub into: numcore::DType,
    /// The number of rows of `D`.
    pub m: usize,
    /// The number of columns of `D`.
    pub n: usize,
    /// The inner size.
    pub k: usize,
    /// The layout of `A`.
    pub a: GemmOperand,
    /// The layout of `B`.
    pub b: GemmOperand,
    /// The layout of `D`.
    pub d: GemmOperand,
    /// The matrix `C` that is added to the product, in place of `D` itself.
    pub c: Option<GemmOperand>,
    /// The work on a vector at `GemmPlaces::vector`, beside the product.
    pub epilogue: Epilogue,
    /// The number of matrices.
    pub batch: usize,
    /// True if the GEMM accumulates into `D`.
    pub add: bool,
    /// True if `f32` operands may be rounded to TF32.
    pub tf32: bool,
}

/// The work of a GEMM on a vector of `D`'s type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// There is no vector.
    Nothing,
    /// The vector `[m]` is added to every column of `D`.
    Bias,
    /// The sum of the columns of `A`, which is not transposed, is written to the vector `[m]`.
    SumOfA,
    /// The sum of the rows of `B`, which is transposed, is written to the vector `[n]`.
    SumOfB,
}

impl Epilogue {
    /// Tells whether the vector is written, in place of read.
    pub fn writes(self) -> bool {
        matches!(self, Epilogue::SumOfA | Epilogue::SumOfB)
    }
}

impl CublasGemm {
    /// The number of elements from the first to the last of the output.
    pub fn output_elements(&self) -> usize {
        (self.batch - 1) * self.d.batch.unsigned_abs() + (self.n - 1) * self.d.leading + self.m
    }

    /// The addresses that the GEMM reads, besides `D`.
    pub fn reads(&self, at: GemmPlaces) -> impl Iterator<Item = u64> {
        let added = [self.c.map(|_| at.c), (self.epilogue == Epilogue::Bias).then_some(at.vector)];
        [at.a, at.b].into_iter().chain(added.into_iter().flatten())
    }
}

/// Prints the row-major product as its caller sees it: `[rows, inner] x [inner, columns]`, a `t` after a transposed
/// operand.
impl fmt::Display for CublasGemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CublasGemm { m, n, k, batch, dtype, into, .. } = *self;
        let turned = |operand: GemmOperand| if operand.transposed { "t" } else { "" };
        write!(f, "[{n}, {k}]{} x [{k}, {m}]{} {dtype} -> {into}", turned(self.b), turned(self.a))?;
        if batch > 1 {
            write!(f, ", {batch} of them")?;
        }
        let added = [
            ("added", self.add),
            ("with a bias", self.epilogue == Epilogue::Bias),
            ("with a sum", matches!(self.epilogue, Epilogue::SumOfA | Epilogue::SumOfB)),
            ("with a residual", self.c.is_some()),
        ];
        added.iter().filter(|(_, is)| *is).try_for_each(|(words, _)| write!(f, ", {words}"))
    }
}

/// The addresses of a GEMM's matrices; `c` and `vector` count only where the GEMM has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GemmPlaces {
    /// The address of `A`.
    pub a: u64,
    /// The address of `B`.
    pub b: u64,
    /// The address of `D`.
    pub d: u64,
    /// The address of `C`.
    pub c: u64,
    /// The address of the epilogue's vector.
    pub vector: u64,
}

/// The layout of a GEMM operand: elements between columns (`leading`) and between batches, and whether it is read
/// transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmOperand {
    /// Elements between columns.
    pub leading: usize,
    /// Elements between matrices of a batch.
    pub batch: isize,
    /// True if the matrix is read transposed.
    pub transposed: bool,
    /// The alignment of the address in bytes (a power of two, 16 at most).
    pub aligned: u32,
}

/// A GPU.
///
/// # Safety
/// Methods are safe to call with handles that this driver created and that were not destroyed. Methods that name memory
/// are `unsafe` and state its requirements.
pub trait Driver: Send + Sync {
    /// The properties of the device.
    fn about(&self) -> &About;

    /// The device's capacity and free bytes, if the driver reports them.
    fn memory(&self) -> Option<DeviceBytes>;
    /// Allocates memory aligned to 256 bytes; `None` when there is not enough.
    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>>;
    /// Notes that a pool uses this range of an allocation as one block from now on. Drivers that watch memory accesses
    /// need it.
    fn note_block(&self, address: u64, bytes: usize) {
        let _ = (address, bytes);
    }
    /// Waits for streams and frees memory; in a captured step, after the capture. No capture begins meanwhile. Frees
    /// wait for the device, so they are done together, and under locks of the driver: `streams` are all that may wait
    /// for another rank.
    ///
    /// # Safety
    /// The addresses are from [`alloc`](Driver::alloc), and no work uses them but that of `streams`.
    unsafe fn free(&self, streams: &[CudaStream], addresses: &[u64]);
    /// Allocates page-locked host memory.
    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8>;
    /// Frees page-locked host memory; in a captured step, after the capture.
    ///
    /// # Safety
    /// The address is from [`alloc_host`](Driver::alloc_host), and no queued work uses it.
    unsafe fn free_host(&self, address: *mut u8);

    /// Makes the device's context current on this thread, for calls of another library.
    fn bind(&self) -> Fallible<()>;

    /// Creates a stream.
    fn stream(&self) -> Fallible<CudaStream>;
    /// Creates a stream whose work goes before that of others.
    fn priority_stream(&self) -> Fallible<CudaStream>;
    /// Destroys a stream, on which no more work is queued.
    fn destroy_stream(&self, stream: CudaStream);
    /// Blocks the host until all work of the stream is done.
    fn synchronize(&self, stream: CudaStream) -> Fallible<()>;
    /// Creates a mark.
    fn mark(&self) -> Fallible<Mark>;
    /// Creates a mark that stores the time at which it is reached.
    fn timed_mark(&self) -> Fallible<Mark>;
    /// The time between two timed marks, both of which were waited for.
    fn elapsed(&self, from: Mark, to: Mark) -> Fallible<Duration>;
    /// Destroys a mark.
    fn destroy_mark(&self, mark: Mark);
    /// Places the mark behind all work of the stream so far.
    fn record(&self, mark: Mark, stream: CudaStream) -> Fallible<()>;
    /// Orders later work of the stream after the mark.
    fn wait(&self, stream: CudaStream, mark: Mark) -> Fallible<()>;
    /// Tells whether the mark is reached; true for one that was never recorded.
    fn is_reached(&self, mark: Mark) -> Fallible<bool>;
    /// Blocks the host until the mark is reached.
    fn await_mark(&self, mark: Mark) -> Fallible<()>;

    /// Queues a copy from page-locked host memory to the device.
    ///
    /// # Safety
    /// Both ranges are valid and stay so until the stream has passed.
    unsafe fn copy_in(&self, stream: CudaStream, to: u64, from: *const u8, bytes: usize) -> Fallible<()>;
    /// Queues a copy from the device to page-locked host memory.
    ///
    /// # Safety
    /// The conditions of [`copy_in`](Driver::copy_in).
    unsafe fn copy_out(&self, stream: CudaStream, to: *mut u8, from: u64, bytes: usize) -> Fallible<()>;
    /// Queues a copy between two ranges of device memory.
    ///
    /// # Safety
    /// The conditions of [`copy_in`](Driver::copy_in); the ranges do not overlap.
    unsafe fn copy(&self, stream: CudaStream, to: u64, from: u64, bytes: usize) -> Fallible<()>;
    /// Queues a filling of `bytes` bytes with zeros.
    ///
    /// # Safety
    /// The range is valid.
    unsafe fn zero(&self, stream: CudaStream, at: u64, bytes: usize) -> Fallible<()>;

    /// Compiles and loads a kernel, once with all kernels of its text. `shared` is the most dynamic shared memory in
    /// bytes that a launch will use.
    fn load(&self, source: &KernelSource, shared: u32) -> Fallible<KernelFunction>;
    /// Queues a kernel.
    ///
    /// # Safety
    /// `args` are the kernel's parameters, and the memory they point to is as its source requires.
    unsafe fn launch(
        &self,
        stream: CudaStream,
        kernel: KernelFunction,
        grid: Grid,
        args: &mut KernelArgs,
    ) -> Fallible<()>;
    /// The number of algorithms to choose from for a GEMM with a vector at this address and a workspace of this many
    /// bytes.
    fn gemm_candidates(&self, gemm: &CublasGemm, vector: u64, workspace: usize) -> Fallible<usize>;
    /// Queues a GEMM by the algorithm of number `candidate`, or by the library's choice.
    ///
    /// # Safety
    /// `at` holds the addresses of the matrices that the GEMM has, and `workspace` an address and its bytes. Matrices
    /// are inside their memory, and what is written overlaps none of the others.
    unsafe fn gemm(
        &self,
        stream: CudaStream,
        gemm: &CublasGemm,
        at: GemmPlaces,
        workspace: (u64, usize),
        candidate: Option<usize>,
    ) -> Fallible<()>;

    /// Begins to capture the work of a stream, in place of running it.
    fn begin_capture(&self, stream: CudaStream) -> Fallible<()>;
    /// Ends the capture.
    fn end_capture(&self, stream: CudaStream) -> Fallible<CapturedGraph>;
    /// Queues a captured graph.
    fn replay(&self, recording: CapturedGraph, stream: CudaStream) -> Fallible<()>;
    /// Destroys a captured graph.
    fn destroy_recording(&self, recording: CapturedGraph);
}
