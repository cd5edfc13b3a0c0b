//! Device addresses of tensors, for libraries of the device's vendor.

use super::{Tensor, TensorMut};
use crate::Runtime;

impl<R: Runtime> Tensor<R> {
    /// The device address of a contiguous tensor, for work that a vendor library queues on the
    /// [`device_queue`](Runtime::device_queue) of `queue`. The memory is not reused before that work is done. `None` if
    /// the tensor is strided or on another device, or if the runtime has no such queue.
    pub fn device_address(&self, queue: &R) -> Option<u64> {
        let reachable = self.layout().is_contiguous() && queue.device() == self.device();
        reachable.then(|| queue.device_address(self.view())).flatten()
    }
}

impl<R: Runtime> TensorMut<R> {
    /// The device address of this memory, which then counts as written; see [`Tensor::device_address`]. `None` in the
    /// same cases.
    pub fn device_address(&mut self, queue: &R) -> Option<u64> {
        let reachable = self.memory.layout().is_contiguous() && queue.device() == self.runtime().device();
        reachable.then(|| queue.device_address_mut(self.rewritten())).flatten()
    }
}
