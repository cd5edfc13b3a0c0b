//! Any GPU as a runtime, through WebGPU: [`Wgpu`].
//!
//! Programs are printed as WGSL by `numcore` and compiled once per program, types and layout class; functions named
//! `wg_…` are defined in this crate (`prelude`), since WGSL's own are wrong in the fifth digit, and WGSL has no 64-bit
//! integers. Every buffer is an array of words of 32 bits; smaller elements are written in whole words where they are
//! contiguous, by atomics elsewhere (`access`). Work is recorded and submitted in batches (`queue`); handles of one
//! adapter share a device, so their tensors may be used together (`device`).
//!
//! f16 and bf16 are upcast and rounded by integer arithmetic, exactly as on the CPU, on every adapter. `i64` is exact.
//! `f64` is stored and moved, but not computed in: that is an error, never a silent change. An index out of range is an
//! error of the next [`download`](numcore::Runtime::download) or [`synchronize`](numcore::Runtime::synchronize) of its
//! queue, and of no other queue; a lost device or a refused kernel is an error of every call from then on.
//!
//! **Invariant**: a kernel binds a buffer once, for any number of operands in it; sizes, strides, offsets and scalars
//! are launch parameters and never part of a kernel's source; no result depends on the order in which invocations run.
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

mod access;
mod bindings;
mod device;
mod elementwise;
mod fused;
mod index;
mod matmul;
mod memory;
mod pipelines;
mod pointwise;
mod prelude;
mod queue;
mod reduce;
mod runtime;
mod scan;
mod sort;

use std::{fmt, sync::Arc};

use numcore::{MemoryCategory, Result};

pub use device::AdapterInfo;
pub use memory::WgpuBuffer;

use device::WgpuDevice;
use queue::Queue;

/// A GPU runtime. A cheap handle; clones share one queue: its memory pool and account.
#[derive(Clone)]
pub struct Wgpu {
    pub(crate) queue: Arc<Queue>,
    use_: MemoryCategory,
}

impl Wgpu {
    /// The adapter with this index in [`adapters`](Wgpu::adapters); handles of one index share one device. Without such
    /// an adapter, the error says what to install.
    pub fn new(index: u32) -> Result<Wgpu> {
        Ok(Wgpu { queue: Arc::new(Queue::new(WgpuDevice::open(index)?)), use_: MemoryCategory::Activations })
    }

    /// The adapters of this machine, hardware before software.
    pub fn adapters() -> Vec<AdapterInfo> {
        device::adapters()
    }

    /// Memory of a kernel's own.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<WgpuBuffer> {
        self.queue.memory.alloc(bytes, self.use_)
    }
}

impl fmt::Debug for Wgpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wgpu({:?}, {:?})", self.queue.device, self.use_)
    }
}
