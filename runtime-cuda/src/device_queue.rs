//! A queue as NVIDIA's other libraries see it; a communicator over NCCL queues its work on it.

use std::sync::Arc;

use numcore::{DeviceQueue, QueueMark, Result};

use crate::{event::CudaEvent, queue::Queue};

/// A queue whose stream other libraries may use.
pub(crate) struct ForeignQueue(pub(crate) Arc<Queue>);

impl DeviceQueue for ForeignQueue {
    fn stream(&self) -> usize {
        self.0.stream.0 as usize
    }

    fn enter(&self, op: &'static str, work: &mut dyn FnMut()) -> Result<()> {
        self.0.enter(op, work)
    }

    fn mark(&self) -> Result<Arc<dyn QueueMark>> {
        Ok(Arc::new(CudaEvent::record(&self.0)?))
    }
}

impl QueueMark for CudaEvent {
    fn is_reached(&self) -> Result<bool> {
        CudaEvent::is_reached(self)
    }
}
