//! [`Wgpu`]: a runtime for any GPU, through WebGPU.
//!
//! `numcore` prints programs as WGSL, and this crate compiles them once per program, types and layout class. Functions
//! named `wg_…` are defined in this crate (`prelude`): WGSL's own are wrong in the fifth digit, and WGSL has no 64-bit
//! integers. Every buffer is an array of 32-bit words. Smaller elements are written in whole words where they are
//! contiguous, by atomics elsewhere (`access`). Where the adapter has subgroups, rows are merged in them, and on
//! software adapters products are computed in them (`matmul`). The bits are those of workgroup memory.
//!
//! Work is recorded and submitted in batches of about ten billion operations, since drivers end long ones (`queue`). A
//! long product or call of attention becomes several launches. Programs of more operands than an adapter binds run on
//! copies in one buffer (`packing`). Handles of one adapter share a device, so their tensors may be used together
//! (`device`). Compiled kernels are kept in the user's cache folder, where the interface can do so (`kernel_file`).
//!
//! f16 and bf16 are upcast and rounded by integer arithmetic, exactly as on the CPU, on every adapter. WGSL's own f16
//! may take subnormals for 0, and its rounding is not specified. `i64` is exact. `f64` is stored and moved, but
//! arithmetic in it is an error, never a silent change. An index out of range is an error of the next
//! [`download`](numcore::Runtime::download) or [`synchronize`](numcore::Runtime::synchronize) of its queue, and of no
//! other queue. A lost device or a refused kernel is an error of every call from then on.
//!
//! **Invariant**: a kernel binds a buffer once, for any number of operands in it. Sizes, strides, offsets and scalars
//! are launch parameters and never part of a kernel's source. No result depends on the order in which invocations run,
//! or on subgroups and their size.
//!
//! ```no_run
//! use numcore::{Tensor, ops::PointwiseOps};
//! use runtime_wgpu::Wgpu;
//!
//! let gpu = Wgpu::new(0)?;
//! let x = Tensor::from_slice(&gpu, [3], &[1f32, 2.0, 3.0])?;
//! assert_eq!(x.add(&x)?.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
//! # Ok::<(), numcore::Error>(())
//! ```
#![warn(unreachable_pub)]

mod access;
mod bindings;
mod device;
mod elementwise;
mod fused;
mod index;
mod kernel_file;
mod matmul;
mod memory;
mod packing;
mod pipelines;
mod pointwise;
mod prelude;
mod queue;
mod reduce;
mod runtime;
mod scan;
mod sort;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc};

use numcore::{MemoryCategory, Result};

pub use device::AdapterInfo;
pub use memory::WgpuBuffer;

use device::WgpuDevice;
use queue::Queue;

/// A handle of a GPU runtime, cheap to clone. Clones share one queue with its memory pool and memory statistics.
#[derive(Clone)]
pub struct Wgpu {
    pub(crate) queue: Arc<Queue>,
    use_: MemoryCategory,
}

impl Wgpu {
    /// A runtime on the adapter at `index` in [`adapters`](Wgpu::adapters), with a queue of its own. Handles of one
    /// index share one device. A software adapter is named on standard error.
    ///
    /// # Errors
    ///
    /// An error if there is no such adapter, with advice on the driver to install, or if the device cannot be opened.
    pub fn new(index: u32) -> Result<Wgpu> {
        Ok(Wgpu { queue: Arc::new(Queue::new(WgpuDevice::open(index)?)), use_: MemoryCategory::Activations })
    }

    /// The adapters of this machine, hardware before software.
    pub fn adapters() -> Vec<AdapterInfo> {
        device::adapters()
    }

    /// Allocates scratch memory for a kernel's intermediate results.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<WgpuBuffer> {
        self.queue.memory.alloc(bytes, self.use_)
    }
}

impl fmt::Debug for Wgpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wgpu({:?}, {:?})", self.queue.device, self.use_)
    }
}
