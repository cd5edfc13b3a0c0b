//! Events: points in queues, which order work between them.

use std::sync::{Arc, Weak};

use numcore::{Error, ErrorKind, Result};

use crate::{
    capture::Capture,
    driver::{CudaStream, Mark, backend},
    engine::Engine,
    queue::Queue,
};

/// A point in a queue, for which other queues can wait.
pub struct CudaEvent {
    engine: Arc<Engine>,
    mark: Mark,
    stream: CudaStream,
    /// The captured step in which the event was recorded; `None` outside of captures.
    captured: Option<Weak<Capture<Queue>>>,
}

impl CudaEvent {
    pub(crate) fn record(queue: &Queue) -> Result<CudaEvent> {
        queue.check()?;
        let mark = queue.kept("record", queue.driver().mark())?;
        let captured = queue.capture().map(|capture| Arc::downgrade(&capture));
        let event = CudaEvent { engine: queue.engine.clone(), mark, stream: queue.stream, captured };
        queue.kept("record", queue.driver().record(mark, queue.stream))?;
        Ok(event)
    }

    /// Makes later work of `queue` wait. A queue that waits for a point of a step being captured joins the step.
    pub(crate) fn wait(&self, queue: &Arc<Queue>) -> Result<()> {
        queue.check()?;
        if self.engine.device != queue.engine.device {
            return Err(ErrorKind::Device { op: "wait", devices: vec![self.engine.device, queue.engine.device] }.into());
        }
        let of = self.captured.as_ref().map(|of| of.upgrade().filter(|of| of.is_open()));
        let why = match (of, queue.capture()) {
            (None, None) => return self.wait_on(queue),
            (Some(Some(of)), Some(own)) if Arc::ptr_eq(&of, &own) => return self.wait_on(queue),
            (Some(Some(of)), None) => {
                queue.begin_capture(&of);
                of.add(queue);
                return self.wait_on(queue);
            }
            (None, Some(_)) => {
                "a captured step cannot wait for other queues: wait for them before it is captured and launched"
            }
            (Some(_), _) => "the event is a point in a captured step, which nothing outside of it can wait for",
        };
        Err(Error::unsupported_on(queue.engine.device, "wait", why))
    }

    fn wait_on(&self, queue: &Queue) -> Result<()> {
        if self.captured.is_some() && self.stream == queue.stream {
            // A captured queue is in order by itself.
            return Ok(());
        }
        queue.kept("wait", queue.driver().wait(queue.stream, self.mark))
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
