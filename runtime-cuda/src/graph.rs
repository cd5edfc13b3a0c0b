//! Whole training steps as one launch: CUDA graphs.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use numcore::{Error, LaunchParticipant, Result};

use crate::{
    Cuda,
    capture::Capture,
    captured_keys::CapturedKeys,
    driver::{CapturedGraph, Fallible},
    event::CudaEvent,
    queue::Queue,
};

/// Work that was captured once and can be launched repeatedly, without the host's part of it. See [`Cuda::capture`].
pub struct Graph {
    queue: Arc<Queue>,
    recording: CapturedGraph,
    /// True if the graph has kernels that may report an index out of range.
    reports: bool,
    /// The other queues of the step, each with the same.
    joined: Vec<(Arc<Queue>, bool)>,
    capture: Arc<Capture<Queue>>,
    /// Other libraries that take part in launches.
    participants: Vec<Arc<dyn LaunchParticipant>>,
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
    /// - A handle that waits for an [event](numcore::Runtime::record) of the step takes part in it from then on, and
    ///   the end of the step waits for it. Work of other handles is not captured, and the step does not wait for it.
    ///   Tensors of other handles that are dropped in the step are kept by the graph.
    /// - Collectives over NCCL take part too. All ranks capture the same step, and launch it equally often. They wait
    ///   for a call by `wait`, not `done`. Run one rank in a process: launches of several GPUs may block one another.
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
        let keys = CapturedKeys::new(queue.engine.device, &queue.memory)?;
        // Other threads see that the queue is captured before the driver captures it, and until it no longer does.
        let capture = Capture::new(keys);
        queue.begin_capture(&capture);
        let begun = queue.kept("capture", queue.driver().begin_capture(queue.stream));
        begun.inspect_err(|_| drop((capture.close(), queue.end_capture())))?;
        // A panic must not leave the queues captured and the device's other threads waiting.
        let result = catch_unwind(AssertUnwindSafe(step));
        for other in capture.joined() {
            // A queue that is not joined back is an error of the capture's end.
            let _ = CudaEvent::record(&other).and_then(|end| end.wait(queue));
        }
        let recording = queue.driver().end_capture(queue.stream);
        let end = |queue: Arc<Queue>| (queue.clone(), queue.end_capture());
        let joined = capture.close().into_iter().map(end).collect();
        let reports = queue.end_capture();
        let discard = |recording: Fallible<CapturedGraph>| {
            if let Ok(recording) = recording {
                queue.driver().destroy_recording(recording);
            }
            queue.memory.release_held(&capture.held);
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
                let recording = queue.kept("capture", recording);
                let recording = recording.inspect_err(|_| queue.memory.release_held(&capture.held))?;
                let participants = capture.take_participants();
                Ok((Graph { queue: queue.clone(), recording, reports, joined, capture, participants }, value))
            }
        }
    }
}

impl Graph {
    /// Queues the whole graph. An index out of range in it is reported by the next read, as for any other work.
    ///
    /// With collectives in the step it returns once all their ranks launch it.
    ///
    /// # Errors
    /// The step draws random values, which would be the same in every launch: use
    /// [`launch_with_seeds`](Graph::launch_with_seeds). Also if a rank of a collective fails, does not launch the step,
    /// or launches another one.
    pub fn launch(&self) -> Result<()> {
        if self.capture.keys.count() > 0 {
            let why = "the captured step draws random values; give each launch seeds of its own by `launch_with_seeds`";
            return Err(Error::usage("launch", why));
        }
        self.replay()
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
        let keys = &self.capture.keys;
        let seeds: Vec<u8> = (0..keys.count()).flat_map(|_| next().to_le_bytes()).collect();
        if !seeds.is_empty() {
            self.queue.upload(&seeds, keys.table())?;
        }
        self.replay()
    }

    /// Queues the graph, with all participants.
    fn replay(&self) -> Result<()> {
        for queue in self.joined.iter().map(|(other, _)| other).chain([&self.queue]) {
            queue.check()?;
            queue.refuse_while_capturing("launch")?;
        }
        let mut begun = 0;
        let before = self.participants.iter().try_for_each(|participant| {
            begun += 1;
            participant.before()
        });
        let queued = before.and_then(|()| self.queue_between());
        self.participants[..begun].iter().fold(queued, |queued, participant| {
            let ended = participant.after(queued.as_ref().copied());
            queued.and(ended)
        })
    }

    /// Queues the graph between the work of all queues that took part in its capture.
    fn queue_between(&self) -> Result<()> {
        self.joined.iter().try_for_each(|(other, _)| CudaEvent::record(other)?.wait(&self.queue))?;
        self.queue.replay(self.recording, self.reports)?;
        if self.joined.is_empty() {
            return Ok(());
        }
        let end = CudaEvent::record(&self.queue)?;
        self.joined.iter().try_for_each(|(other, reports)| {
            other.may_report(*reports);
            end.wait(other)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Running work must not lose its graph.
        let _ = self.queue.driver().synchronize(self.queue.stream);
        self.queue.driver().destroy_recording(self.recording);
        self.queue.memory.release_held(&self.capture.held);
    }
}
