//! Any GPU as a runtime, through WebGPU: [`Wgpu`].
#![warn(missing_docs)]

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

use numcore::{Result, Use};

pub use device::AdapterInfo;
pub use memory::Buffer;

use device::Device;
use queue::Queue;

/// A GPU. A cheap handle; clones share one queue: its memory pool and account.
#[derive(Clone)]
pub struct Wgpu {
    pub(crate) queue: Arc<Queue>,
    use_: Use,
}

impl Wgpu {
    /// The adapter of this number in [`adapters`](Wgpu::adapters); handles of one number share one device. An error says what to
    /// install where there is none.
    pub fn new(index: u32) -> Result<Wgpu> {
        Ok(Wgpu { queue: Arc::new(Queue::new(Device::open(index)?)), use_: Use::Activations })
    }

    /// The adapters of this machine, hardware before software.
    pub fn adapters() -> Vec<AdapterInfo> {
        device::adapters()
    }

    /// Memory of a kernel's own.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<Buffer> {
        self.queue.memory.alloc(bytes, self.use_)
    }
}

impl fmt::Debug for Wgpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wgpu({:?}, {:?})", self.queue.device, self.use_)
    }
}
