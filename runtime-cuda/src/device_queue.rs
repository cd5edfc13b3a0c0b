//! A queue as NVIDIA's other libraries see it; a communicator over NCCL queues its work on it.

use std::sync::Arc;

use numcore::{DeviceQueue, LaunchParticipant, QueueMark, Result};

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
        self.0.refuse_while_capturing("record")?;
        Ok(Arc::new(CudaEvent::record(&self.0)?))
    }

    fn at_launch(&self, key: usize, participant: &mut dyn FnMut() -> Arc<dyn LaunchParticipant>) -> bool {
        let capture = self.0.capture();
        capture.inspect(|capture| capture.take_part(key, participant)).is_some()
    }
}

impl QueueMark for CudaEvent {
    fn is_reached(&self) -> Result<bool> {
        CudaEvent::is_reached(self)
    }
}
