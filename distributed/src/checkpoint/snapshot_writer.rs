//! Background saving: a copy on the host, and a thread that writes it while training goes on.

use std::{
    collections::BTreeMap,
    thread::{Builder, JoinHandle, sleep},
    time::{Duration, Instant},
};

use numcore::{Error, Result, Runtime, trace};

use super::{Checkpointed, Folder, Snapshot};
use crate::comm::{Collectives, Comm, Communicator, Patient, all_ok, panic_message};

/// The interval at which a thread is polled during a bounded wait.
const POLL: Duration = Duration::from_millis(5);
/// The factor between the timeout of other calls and that of ranks that save.
const SLOWER: u32 = 10;

/// The result of a thread's work, and the memory that it read.
type Written = (Result<()>, Option<Snapshot>);

/// Saves checkpoints one after another while training goes on (PyTorch's `async_save`). Ranks pause only for a copy of
/// their parts to host memory. A thread on each rank writes its copy, and that of rank 0 publishes the checkpoint.
/// Training changes nothing that is being saved.
///
/// A rank needs host memory for one copy of its part. The next save waits until the last one is in place, and reuses
/// its memory. An error in the thread is returned by the next call of [`save`](SnapshotWriter::save) or
/// [`finish`](SnapshotWriter::finish), on all ranks; the last good checkpoint stays. With an engine whose transfers are
/// [not independent](crate::comm::Guarantees::independent_transfers), `save` returns only after everything is written.
///
/// ```no_run
/// # use distributed::{checkpoint::{Folder, SnapshotWriter}, train::{CheckpointNotes, Loss, TrainStep}};
/// # use numcore::{NullRuntime, Result};
/// # fn train(mut step: TrainStep<NullRuntime>, loss: impl Fn() -> Result<Loss<NullRuntime>>) -> Result<()> {
/// let folder = Folder::new("checkpoints");
/// let mut writer = step.snapshot_writer()?;
/// for k in 1..=1000 {
///     step.step(|_| loss())?;
///     if k % 100 == 0 {
///         step.save_in_background(&mut writer, &folder, &CheckpointNotes::new())?;
///     }
/// }
/// writer.finish()
/// # }
/// ```
pub struct SnapshotWriter<R: Runtime> {
    /// A communicator of its own, on which training makes no calls.
    comm: Comm<R>,
    running: Option<JoinHandle<Written>>,
    /// The memory of the last copy.
    spare: Snapshot,
}

impl<R: Runtime> SnapshotWriter<R> {
    /// Makes a writer for the ranks of a communicator that save together. Collective: all of them call it.
    pub fn new(comm: &Comm<R>) -> Result<Self> {
        let own = if comm.size() == 1 { Some(comm.clone()) } else { comm.split(Some(0), comm.rank())? };
        let comm = own.ok_or_else(|| Error::internal("SnapshotWriter", "the ranks form no group"))?;
        // A rank's thread may be starved by training, or by the file system.
        let comm = Patient::over(&comm, comm.timeout().saturating_mul(SLOWER));
        Ok(SnapshotWriter { comm, running: None, spare: Snapshot::default() })
    }

    /// Saves the present state of a training step, or of any other [`Checkpointed`], as [`Folder::save`] does. Every
    /// rank calls it, in the thread that trains. It returns when the copy is made.
    ///
    /// # Errors
    /// On all ranks, if the previous save failed, or a rank cannot copy its part: nothing is saved then.
    pub fn save(
        &mut self,
        folder: &Folder,
        step: u64,
        state: &(impl Checkpointed<R> + ?Sized),
        notes: &BTreeMap<String, String>,
    ) -> Result<()> {
        self.finish()?;
        let mut snapshot = std::mem::take(&mut self.spare);
        // Nothing is under way, so a collective call is allowed.
        all_ok(&self.comm, "save", snapshot.copy(state))?;
        let (folder, notes) = (folder.clone(), notes.clone());
        self.spawn(move |comm| (folder.save_snapshot(comm, step, &snapshot, &notes), Some(snapshot)))?;
        if self.comm.guarantees().independent_transfers { Ok(()) } else { self.finish() }
    }

    /// Starts other work in the thread, after the previous work has ended. The closure may make collective calls on the
    /// communicator it gets, the same ones on all ranks.
    ///
    /// # Errors
    /// The errors of the previous work.
    pub fn start(&mut self, work: impl FnOnce(&Comm<R>) -> Result<()> + Send + 'static) -> Result<()> {
        self.finish()?;
        self.spawn(|comm| (work(comm), None))
    }

    fn spawn(&mut self, work: impl FnOnce(&Comm<R>) -> Written + Send + 'static) -> Result<()> {
        let (comm, rank) = (self.comm.clone(), trace::rank());
        let write = move || {
            rank.into_iter().for_each(trace::set_rank);
            work(&comm)
        };
        let thread = Builder::new().name("checkpoint".into()).spawn(write);
        let none = |e| Error::io("thread checkpoint", e);
        self.running = Some(thread.map_err(none)?);
        Ok(())
    }

    /// The communicator of the ranks that save together. Make no calls on it during a save.
    pub fn comm(&self) -> &Comm<R> {
        &self.comm
    }

    /// Tells whether this rank's thread still writes.
    pub fn is_writing(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.is_finished())
    }

    /// Returns the result of the background work if it has ended, and `Ok` while it goes on. Ranks see the end at
    /// different times.
    pub fn poll(&mut self) -> Result<()> {
        if self.is_writing() { Ok(()) } else { self.finish() }
    }

    /// Waits for the background work, at most for `most`. If it failed, the next [`finish`](SnapshotWriter::finish)
    /// returns its error.
    pub fn wait_at_most(&self, most: Duration) {
        let begun = Instant::now();
        while self.is_writing() && begun.elapsed() < most {
            sleep(POLL);
        }
    }

    /// Waits until the background save is in place.
    ///
    /// # Errors
    /// The error of the thread, on all ranks. It is returned once.
    pub fn finish(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        let (written, spare) = running.join().unwrap_or_else(|panic| {
            let why = format!("the thread that saves {}", panic_message(&*panic));
            (Err(Error::internal("save", why)), None)
        });
        self.spare = spare.unwrap_or_default();
        written
    }
}

/// Writes a running save to its end, whatever ends the run; its error is lost then.
impl<R: Runtime> Drop for SnapshotWriter<R> {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}
