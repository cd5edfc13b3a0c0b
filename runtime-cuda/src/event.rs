//! Events: points in queues, which order work between them.

use std::sync::Arc;

use numcore::{Error, ErrorKind, Result};

use crate::{
    driver::{CudaStream, Mark, backend},
    engine::Engine,
    queue::Queue,
};

/// A point in a queue, for which other queues can wait.
pub struct CudaEvent {
    engine: Arc<Engine>,
    mark: Mark,
    /// The stream, and the number of the capture, in which the event was recorded; `None` outside of captures.
    captured: Option<(CudaStream, u64)>,
}

impl CudaEvent {
    pub(crate) fn record(queue: &Queue) -> Result<CudaEvent> {
        queue.check()?;
        let mark = queue.kept("record", queue.driver().mark())?;
        let captured = queue.capture_number().map(|number| (queue.stream, number));
        let event = CudaEvent { engine: queue.engine.clone(), mark, captured };
        queue.kept("record", queue.driver().record(mark, queue.stream))?;
        Ok(event)
    }

    pub(crate) fn wait(&self, queue: &Queue) -> Result<()> {
        queue.check()?;
        if self.engine.device != queue.engine.device {
            return Err(ErrorKind::Device { op: "wait", devices: vec![self.engine.device, queue.engine.device] }.into());
        }
        let capturing = queue.capture_number().map(|number| (queue.stream, number));
        if self.captured == capturing {
            return match capturing {
                // Within a capture there is one queue, which is in order by itself.
                Some(_) => Ok(()),
                None => queue.kept("wait", queue.driver().wait(queue.stream, self.mark)),
            };
        }
        let why = match self.captured {
            Some(_) => "the event is a point in a captured step, which nothing outside of it can wait for",
            None => "a captured step cannot wait for other queues: wait for them before it is captured and launched",
        };
        Err(Error::unsupported_on(queue.engine.device, "wait", why))
    }

    pub(crate) fn is_reached(&self) -> Result<bool> {
        let reached = self.engine.driver.is_reached(self.mark);
        reached.map_err(|failure| backend("record", self.engine.device, failure))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        self.engine.driver.destroy_mark(self.mark);
    }
}
