//! NVIDIA GPUs as a runtime: [`Cuda`].
//!
//! Pointwise programs and reductions are printed as CUDA C around numcore's programs and compiled at run time
//! (`codegen`). Other kernels are hand-written in the folder `kernels`; matrix products use cuBLASLt. Every queue has a
//! stream for kernels, a stream for copies and a memory pool. Work is queued, and methods return at once.
//!
//! Requirements: NVIDIA's driver and cuBLASLt, and NVRTC for kernels that are not compiled yet. They are loaded at run
//! time, so this crate builds without them. The error of [`Cuda::new`] names the missing library, or quotes the
//! system's loader.
//!
//! **Invariant**: results depend only on operands, types and strides. There are no atomics on floats, and no sum is
//! partitioned by the size of the GPU. [`Cuda::with_tuned_products`] gives up this invariant on request.
//!
//! ```no_run
//! use numcore::{Tensor, ops::PointwiseOps};
//! use runtime_cuda::Cuda;
//!
//! let cuda = Cuda::new(0)?;
//! let x = Tensor::from_slice(&cuda, [3], &[1f32, 2.0, 3.0])?;
//! assert_eq!(x.add(&x)?.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
//! # Ok::<(), numcore::Error>(())
//! ```
//!
//! # Kernels on disk
//!
//! Machine code is kept in `$XDG_CACHE_HOME/weftgrad/cuda` (or `~/.cache/weftgrad/cuda`). A file's name identifies
//! source, options, architecture and the driver's major version of CUDA. A kernel in this folder needs no compiler.
//! Deleting the folder is always safe.
//!
//! # Errors
//!
//! Work is queued, so an error may be reported later. A fault of the device (an illegal address, uncorrectable memory)
//! is sticky: every later call reports it, with the queue's last sixteen launches. Any other failure of the driver or a
//! library is returned once, by the call that met it. An index out of range is found when results are next read
//! (`download`, `synchronize`). It is reported once, and the queue continues.
#![warn(unreachable_pub)]

mod axes;
mod axis_ops;
mod capture;
mod captured_keys;
mod codegen;
mod device_queue;
pub mod driver;
mod engine;
mod event;
mod fused;
mod graph;
mod handwritten;
mod index;
mod kernel_times;
mod matmul;
mod matrix_layout;
mod memory;
mod operand;
mod pointwise;
mod queue;
mod radix;
mod recent;
mod reduce;
mod runtime;
mod scatter;
mod sort;
mod staging;
mod tuned;

use std::{fmt, sync::Arc};

use numcore::{DeviceId, MemoryCategory, Result};

pub use event::CudaEvent;
pub use graph::Graph;
pub use memory::CudaBuffer;

use driver::{Driver, Fallible};
use engine::Engine;
use queue::Queue;

/// A GPU. A cheap handle; clones share one queue: its stream, memory pool and memory statistics.
#[derive(Clone)]
pub struct Cuda {
    pub(crate) queue: Arc<Queue>,
    use_: MemoryCategory,
    products: ProductOptions,
}

/// Options of matrix products: TF32 for `f32` operands, algorithms chosen by timing, and attention by warpgroups.
#[derive(Clone, Copy, Default)]
struct ProductOptions {
    tf32: bool,
    tuned: bool,
    warpgroups: bool,
}

impl Cuda {
    /// Opens the GPU with index `index`, on a new stream. Handles of one GPU share its context, so their tensors may be
    /// used together.
    ///
    /// # Errors
    ///
    /// The driver or a library is missing, no GPU has this index, or the GPU is older than compute capability 8.0.
    pub fn new(index: u32) -> Result<Cuda> {
        Self::on(Engine::open(index)?)
    }

    /// A device over another driver, opened with `driver` unless a handle of `device` is in use: handles share it.
    ///
    /// # Errors
    /// The error of `driver`, or of the new queue.
    pub fn shared(device: DeviceId, driver: impl FnOnce() -> Fallible<Arc<dyn Driver>>) -> Result<Cuda> {
        Self::on(Engine::shared(device, driver)?)
    }

    /// A device over another driver, which no other handle shares.
    ///
    /// # Errors
    /// The driver's error for a new queue.
    pub fn apart(device: DeviceId, driver: Arc<dyn Driver>) -> Result<Cuda> {
        Self::on(Arc::new(Engine::new(driver, device)))
    }

    /// The hand-written kernels that this GPU has loaded: file, entry function and defines of each, in order.
    pub fn loaded_kernels(&self) -> Vec<String> {
        self.queue.engine.loaded_kernels()
    }

    /// A handle on this queue whose `f32` GEMM uses tensor cores (TF32: 10 bits of fraction instead of 23). Off by
    /// default.
    pub fn with_tf32(mut self, on: bool) -> Cuda {
        self.products.tf32 = on;
        self
    }

    /// A handle on this queue whose matrix products use the fastest of up to eight algorithms that cuBLASLt suggests.
    /// Off by default.
    ///
    /// Each shape, layout and type is timed at its first use outside of a captured step. This first use takes some
    /// thirty times as long and waits for the GPU; the choice is kept for the process.
    ///
    /// Another run or another GPU may find another algorithm fastest, and its sums are in another order. So **results
    /// no longer repeat to the bit**: from run to run, after resuming, and between ranks that compute the same values.
    /// The option suits steps of few shapes: where lengths of sequences change, each length is timed.
    pub fn with_tuned_products(mut self, on: bool) -> Cuda {
        self.products.tuned = on;
        self
    }

    /// A handle on this queue whose attention of halves, with heads 64 or 128 wide, multiplies by four warps together
    /// (`wgmma`), on GPUs of compute capability 9.0. Off by default: only an emulated GPU has run these products so
    /// far.
    pub fn with_warpgroups(mut self, on: bool) -> Cuda {
        self.products.warpgroups = on;
        self
    }

    fn on(engine: Arc<Engine>) -> Result<Cuda> {
        Ok(Cuda {
            queue: Arc::new(Queue::new(engine)?),
            use_: MemoryCategory::Activations,
            products: ProductOptions::default(),
        })
    }

    /// Allocates scratch memory for a kernel, booked under this handle's memory category.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<CudaBuffer> {
        self.queue.memory.alloc(bytes, self.use_)
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let engine = &self.queue.engine;
        write!(f, "Cuda({}, {}, {:?})", engine.device, engine.capabilities.name, self.use_)
    }
}
