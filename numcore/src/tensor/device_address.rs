//! Where tensors are stored in a device's memory, for libraries of its vendor.

use super::{Tensor, TensorMut};
use crate::Runtime;

impl<R: Runtime> Tensor<R> {
    /// The address of a contiguous tensor in the device's memory, for work that a library queues on the
    /// [`device_queue`](Runtime::device_queue) of `queue`: the memory is not reused before that work is done. None where the tensor is
    /// strided or on another device, or the runtime has no such queue.
    pub fn device_address(&self, queue: &R) -> Option<u64> {
        let reachable = self.layout().is_contiguous() && queue.device() == self.device();
        reachable.then(|| queue.device_address(self.view())).flatten()
    }
}

impl<R: Runtime> TensorMut<R> {
    /// The address of row-major memory, where [`Tensor::device_address`] gives that of a tensor. The memory counts as written.
    pub fn device_address(&mut self, queue: &R) -> Option<u64> {
        let reachable = self.memory.layout().is_contiguous() && queue.device() == self.runtime().device();
        reachable.then(|| queue.device_address_mut(self.rewritten())).flatten()
    }
}
