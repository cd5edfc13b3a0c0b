//! Whole training steps as one launch: CUDA graphs.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use numcore::{Error, Result};

use crate::{
    Cuda,
    captured_keys::CapturedKeys,
    driver::{CapturedGraph, Fallible},
    memory::HeldBlocks,
    queue::Queue,
};

/// Work that was captured once and can be launched repeatedly, without the host's part of it. See [`Cuda::capture`].
pub struct Graph {
    queue: Arc<Queue>,
    recording: CapturedGraph,
    /// True if the graph has kernels that may report an index out of range.
    reports: bool,
    held: Arc<HeldBlocks>,
    keys: Arc<CapturedKeys>,
}

impl Cuda {
    /// Captures the work that `step` queues on this handle instead of running it; [`Graph::launch`] runs it. Also
    /// returns the result of `step`.
    ///
    /// The rules below are errors by name wherever a violation can be found:
    ///
    /// - Run the step two or three times before: kernels must be compiled, and the pool must hold all the memory the
    ///   step allocates.
    /// - In the step, the host reads and writes no tensor: no `to_vec`, `item`, uploads or `synchronize`. Read the loss
    ///   after a launch, from the tensor that `step` returned.
    /// - Every launch works on the same memory: write new data into the tensors that the step reads. Tensors that the
    ///   step reads and did not create must outlive the graph.
    /// - Run-time scalars are frozen; a value that changes belongs in a tensor. An optimizer whose update depends on
    ///   the number of steps, or whose learning rate follows a schedule, is refused unless it is `capturable()`. Call
    ///   `advance` on it before each launch.
    /// - A step with random values (dropout) is launched by [`Graph::launch_with_seeds`].
    /// - All work is queued on this handle. Work of other handles is not captured, and the step does not wait for it.
    ///   Tensors of other handles that are dropped in the step are kept by the graph.
    /// - Other threads may continue. Their calls that would break a capture (allocating device memory, loading kernels)
    ///   wait for its end. Data loaders use a [`fork`](numcore::Runtime::fork).
    ///
    /// Memory that the step used stays with the graph until the graph is dropped.
    ///
    /// # Errors
    ///
    /// The queue has failed or is being captured, the step fails or breaks a rule, or the driver invalidates the
    /// capture.
    pub fn capture<T>(&self, step: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        let queue = &self.queue;
        queue.check()?;
        queue.refuse_while_capturing("capture")?;
        queue.workspace()?;
        let keys = Arc::new(CapturedKeys::new(queue.engine.device, &queue.memory)?);
        queue.kept("capture", queue.driver().begin_capture(queue.stream))?;
        queue.begin_capture(keys.clone());
        let held = queue.memory.begin_capture();
        // A panic must not leave the queue captured and the device's other threads waiting.
        let result = catch_unwind(AssertUnwindSafe(step));
        queue.memory.end_capture();
        let reports = queue.end_capture();
        let recording = queue.driver().end_capture(queue.stream);
        let discard = |recording: Fallible<CapturedGraph>| {
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
    /// Queues the whole graph. An index out of range in it is reported by the next read, as for any other work.
    ///
    /// # Errors
    /// The step draws random values, which would be the same in every launch: use
    /// [`launch_with_seeds`](Graph::launch_with_seeds).
    pub fn launch(&self) -> Result<()> {
        if self.keys.count() > 0 {
            let why = "the captured step draws random values; give each launch seeds of its own by `launch_with_seeds`";
            return Err(Error::usage("launch", why));
        }
        self.queue.replay(self.recording, self.reports)
    }

    /// Queues the whole graph with new seeds of its random values. `next` is called once for each seed of the step, in
    /// the order in which the step first used them. With the step's own stream of seeds, the launch draws the values
    /// that the step would draw:
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
