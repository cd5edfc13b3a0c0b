//! Whole training steps as one launch: CUDA graphs.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use numcore::{Error, Result};

use crate::{
    Cuda,
    captured_keys::CapturedKeys,
    driver::{Fallible, Recording},
    memory::HeldBlocks,
    queue::Queue,
};

/// Work that was captured once and can be launched repeatedly, without the host's part of it. See [`Cuda::capture`].
pub struct Graph {
    queue: Arc<Queue>,
    recording: Recording,
    /// Whether it has kernels that report an index out of range.
    reports: bool,
    held: Arc<HeldBlocks>,
    keys: Arc<CapturedKeys>,
}

impl Cuda {
    /// Captures the work that `step` queues on this handle, instead of running it; [`Graph::launch`] runs it. Also
    /// returns the result of `step`.
    ///
    /// The rules, each of which is an error by name where it can be found:
    ///
    /// - Run the step two or three times before: kernels must be compiled, and the pool must hold all the memory it
    ///   allocates.
    /// - Inside, nothing is read or written by the host: no `to_vec`, `item`, uploads or `synchronize`. Read the loss
    ///   after a launch, from the tensor that `step` returned.
    /// - Every launch works on the same memory: new data go into the tensors the step reads. Tensors that the step
    ///   reads and did not create must outlive the graph.
    /// - Run-time scalars are frozen; a value that changes belongs in a tensor. An optimizer whose update depends on the number of steps, or whose
    ///   learning rate follows a schedule, is refused unless it is `capturable()`; `advance` moves it on before each launch.
    /// - A step with random values (dropout) is launched by [`Graph::launch_with_seeds`].
    /// - All work is queued on this handle; work of other handles is not captured, and nothing in the step waits for it. Tensors of other handles
    ///   that are dropped in the step are kept by the graph.
    /// - Other threads may go on: what would break a capture (memory of the device, kernels that are loaded) waits for its end. Loaders use a
    ///   [`fork`](numcore::Runtime::fork).
    ///
    /// Memory the step used stays with the graph until it is dropped.
    pub fn capture<T>(&self, step: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        let queue = &self.queue;
        queue.check()?;
        queue.refuse_while_capturing("capture")?;
        queue.workspace()?;
        let keys = Arc::new(CapturedKeys::new(&queue.engine, &queue.memory)?);
        queue.kept("capture", queue.driver().begin_capture(queue.stream))?;
        queue.begin_capture(keys.clone());
        let held = queue.memory.begin_capture();
        // A panic must not leave the queue captured, and the device's other threads waiting.
        let result = catch_unwind(AssertUnwindSafe(step));
        queue.memory.end_capture();
        let reports = queue.end_capture();
        let recording = queue.driver().end_capture(queue.stream);
        let discard = |recording: Fallible<Recording>| {
            if let Ok(recording) = recording {
                queue.driver().destroy_recording(recording);
            }
            queue.memory.release_held(&held);
        };
        match result {
            Err(panic) => {
                discard(recording);
                resume_unwind(panic)
            }
            // The step's own error says more than that of the capture it broke.
            Ok(Err(error)) => {
                discard(recording);
                Err(error)
            }
            Ok(Ok(value)) => {
                let recording = queue.kept("capture", recording).inspect_err(|_| queue.memory.release_held(&held))?;
                Ok((Graph { queue: queue.clone(), recording, reports, held, keys }, value))
            }
        }
    }
}

impl Graph {
    /// Queues the whole graph. An index out of range in it is found as that of any other work: by the next read.
    ///
    /// # Errors
    /// If the step draws random values, which would be the same in every launch: [`launch_with_seeds`](Graph::launch_with_seeds) is for that.
    pub fn launch(&self) -> Result<()> {
        if self.keys.count() > 0 {
            let why = "the captured step draws random values; give each launch seeds of its own by `launch_with_seeds`";
            return Err(Error::argument("launch", why));
        }
        self.queue.replay(self.recording, self.reports)
    }

    /// Queues the whole graph, with other seeds of its random values: `next` is called once for each of the step's seeds, in the order in which the
    /// step first used them. With the stream that the step itself drew from, the launch draws what the step would:
    ///
    /// ```text
    /// let before = random_state();
    /// let (graph, loss) = rt.capture(step)?;
    /// set_random_state(before); // the capture took seeds, and drew nothing
    /// loop {
    ///     graph.launch_with_seeds(next_seed)?;
    /// }
    /// ```
    pub fn launch_with_seeds(&self, mut next: impl FnMut() -> u64) -> Result<()> {
        let seeds: Vec<u8> = (0..self.keys.count()).flat_map(|_| next().to_le_bytes()).collect();
        if !seeds.is_empty() {
            self.queue.upload(&seeds, self.keys.table())?;
        }
        self.queue.replay(self.recording, self.reports)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Running work must not lose its graph.
        let _ = self.queue.driver().synchronize(self.queue.stream);
        self.queue.driver().destroy_recording(self.recording);
        self.queue.memory.release_held(&self.held);
    }
}
