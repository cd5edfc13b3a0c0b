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

mod args;
mod axes;
mod axis_ops;
mod captured_keys;
mod codegen;
mod device_queue;
mod driver;
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

use numcore::{MemoryCategory, Result};

#[cfg(feature = "emulate")]
pub use driver::{AccessOrder, EmulatedMemory, GemmCandidates, GemmRefusal};
pub use event::CudaEvent;
pub use graph::Graph;
pub use memory::CudaBuffer;

use engine::Engine;
use queue::Queue;

/// A device index that no GPU has.
#[cfg(feature = "emulate")]
const EMULATED: numcore::DeviceId = numcore::DeviceId { kind: numcore::DeviceKind::Cuda, index: u32::MAX };

/// A GPU. A cheap handle; clones share one queue: its stream, memory pool and memory statistics.
#[derive(Clone)]
pub struct Cuda {
    pub(crate) queue: Arc<Queue>,
    use_: MemoryCategory,
    products: ProductOptions,
}

/// Options of matrix products: TF32 for `f32` operands, and algorithms chosen by timing.
#[derive(Clone, Copy, Default)]
struct ProductOptions {
    tf32: bool,
    tuned: bool,
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

    /// An emulated GPU: the host interprets the PTX that NVRTC gives for each kernel, which is cached in `folder`. It is
    /// slow, checks every access ([`ptx`](::ptx#checks)), and is exact enough to test everything but the hardware.
    #[cfg(feature = "emulate")]
    pub fn emulated(folder: impl AsRef<std::path::Path>) -> Result<Cuda> {
        Self::on(Engine::shared(EMULATED, || Ok(Arc::new(driver::Emulated::new(folder.as_ref()))))?)
    }

    /// Compiles the kernels that `work` launches, for [`Cuda::emulated`] in the same `folder`, on all processors. Nothing
    /// is computed: `work` reads zeros, and its failures are ignored.
    #[cfg(feature = "emulate")]
    pub fn compile_for(folder: impl AsRef<std::path::Path>, work: impl FnOnce(&Cuda)) -> Result<()> {
        let listing = Arc::new(driver::Listing::new());
        work(&Self::apart(listing.clone())?);
        let compiler = driver::compiler(folder.as_ref());
        let done = driver::for_each(&listing.take_distinct(), |source| compiler.ptx(source).map(drop));
        done.map_err(|e| driver::backend("compile", EMULATED, e))
    }

    /// Compiles the kernels that `work` launches into the [folder](crate#kernels-on-disk) of compiled kernels, and
    /// returns their number. GPUs that find their kernels in this folder need no compiler.
    ///
    /// The GPUs have compute capability `capability` (90 is 9.0), and `driver` is their driver's major version of CUDA.
    /// The call needs NVRTC and no GPU, and uses all processors. Nothing is computed: `work` reads zeros, and its
    /// failures are ignored.
    ///
    /// # Errors
    /// No folder is known, NVRTC is missing or newer than the driver, or kernels do not compile; the other kernels are
    /// compiled and kept.
    #[cfg(feature = "emulate")]
    pub fn precompile(capability: u32, driver: u32, work: impl FnOnce(&Cuda)) -> Result<usize> {
        let error = |e| driver::backend("Cuda::precompile", EMULATED, e);
        let Some(folder) = driver::Compiler::cache_folder() else {
            return Err(error(driver::DriverFailure::new(
                "neither XDG_CACHE_HOME nor HOME says where kernels are kept",
            )));
        };
        let listing = Arc::new(driver::Listing::new());
        work(&Self::apart(listing.clone())?);
        let compiler = driver::Compiler::new(driver::Architecture(capability), Some(driver as i32), Some(folder));
        let sources = listing.take_distinct();
        let compiled = driver::for_each(&sources, |source| compiler.compile(source).map(drop));
        compiled.map(|()| sources.len()).map_err(error)
    }

    /// An emulated GPU, separate from [`Cuda::emulated`], and a race detector. The detector reports memory accesses
    /// that streams and events do not order.
    #[cfg(feature = "emulate")]
    pub fn watched(folder: impl AsRef<std::path::Path>) -> Result<(Cuda, AccessOrder)> {
        let ordered = driver::Ordered::new(driver::Emulated::new(folder.as_ref()));
        let order = ordered.order();
        Ok((Self::apart(Arc::new(ordered))?, order))
    }

    /// An emulated GPU, separate from [`Cuda::emulated`], in whose kernels' sources the text `from` is replaced by `to`; and
    /// the number of kernels loaded so far that had it. It shows which faults of a kernel are found.
    #[cfg(feature = "emulate")]
    pub fn altered(folder: impl AsRef<std::path::Path>, from: &str, to: &str) -> Result<(Cuda, impl Fn() -> u64)> {
        let (emulated, altered) = driver::Emulated::new(folder.as_ref()).altering(from, to);
        Ok((Self::apart(Arc::new(emulated))?, move || altered.load(std::sync::atomic::Ordering::Relaxed)))
    }

    /// The hand-written kernels that this GPU has loaded: file, entry function and defines of each, in order.
    #[cfg(feature = "emulate")]
    pub fn loaded_kernels(&self) -> Vec<String> {
        self.queue.engine.loaded_kernels()
    }

    /// An emulated GPU with `bytes` bytes of memory that computes nothing; all reads yield zeros. It shows quickly how
    /// much memory a step of any size needs.
    #[cfg(feature = "emulate")]
    pub fn unexecuted(bytes: usize) -> Result<(Cuda, EmulatedMemory)> {
        let driver = Arc::new(driver::Listing::of(bytes));
        let memory = driver.device_memory().clone();
        Ok((Self::apart(driver)?, memory))
    }

    /// An emulated GPU on the given driver, with an engine of its own.
    #[cfg(feature = "emulate")]
    fn apart(driver: Arc<dyn driver::Driver>) -> Result<Cuda> {
        Self::on(Arc::new(Engine::new(driver, EMULATED)))
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
