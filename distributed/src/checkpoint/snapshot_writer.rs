//! Saving while training goes on: a copy on the host, and a thread that writes it.

use std::{
    collections::BTreeMap,
    thread::{Builder, JoinHandle, sleep},
    time::{Duration, Instant},
};

use numcore::{Error, Result, Runtime, trace};

use super::{Checkpointed, Folder, Snapshot};
use crate::comm::{Collectives, Comm, Communicator, all_ok, panic_message};

/// How often a thread is looked at that is waited for, but not for long.
const POLL: Duration = Duration::from_millis(5);

/// What a thread gives back: what became of its work, and the memory that it read.
type Written = (Result<()>, Option<Snapshot>);

/// Saves checkpoints one after another while training goes on (PyTorch's `async_save`). The ranks are held up by a copy of their parts to host memory; a thread of
/// each writes its copy, and that of rank 0 publishes the checkpoint. Nothing that training does meanwhile changes what is saved.
///
/// A rank needs memory on the host for one copy of what it saves: the next save waits until the last one is in place, and reuses its memory. What fails in
/// the thread is the error of the next call of [`save`](SnapshotWriter::save) or [`finish`](SnapshotWriter::finish), on all ranks; the last good checkpoint stays.
/// Over an engine whose transfers are [not independent](crate::comm::Guarantees::independent_transfers) everything is written before `save` returns.
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
    /// The ranks, over calls that training makes none of.
    comm: Comm<R>,
    running: Option<JoinHandle<Written>>,
    /// The memory of the last copy.
    spare: Snapshot,
}

impl<R: Runtime> SnapshotWriter<R> {
    /// For all ranks of a communicator, which all call it: those that save together.
    pub fn new(comm: &Comm<R>) -> Result<Self> {
        let own = if comm.size() == 1 { Some(comm.clone()) } else { comm.split(Some(0), comm.rank())? };
        let comm = own.ok_or_else(|| Error::internal("SnapshotWriter", "the ranks split into no group"))?;
        Ok(SnapshotWriter { comm, running: None, spare: Snapshot::default() })
    }

    /// Saves what a training step, or anything else that is [`Checkpointed`], has now, as [`Folder::save`] does: every rank calls it, in the thread that trains. It
    /// returns when the copy is made.
    ///
    /// # Errors
    /// On all ranks, if the save before failed, or a rank cannot copy its part: nothing is saved then.
    pub fn save(
        &mut self,
        folder: &Folder,
        step: u64,
        state: &(impl Checkpointed<R> + ?Sized),
        notes: &BTreeMap<String, String>,
    ) -> Result<()> {
        self.finish()?;
        let mut snapshot = std::mem::take(&mut self.spare);
        // Nothing is under way, so the ranks may meet here.
        all_ok(&self.comm, "save", snapshot.copy(state))?;
        let (folder, notes) = (folder.clone(), notes.clone());
        self.spawn(move |comm| (folder.save_snapshot(comm, step, &snapshot, &notes), Some(snapshot)))?;
        if self.comm.guarantees().independent_transfers { Ok(()) } else { self.finish() }
    }

    /// Starts other work in the thread, once what was started before is done: it may call what it is given, which all ranks do alike.
    ///
    /// # Errors
    /// Those of the work before.
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
        let none = |e| Error::argument("save", format!("no thread to save in: {e}"));
        self.running = Some(thread.map_err(none)?);
        Ok(())
    }

    /// The ranks that save together, over calls of their own: not to be called on while something is written.
    pub fn comm(&self) -> &Comm<R> {
        &self.comm
    }

    /// Whether this rank still writes.
    pub fn is_writing(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.is_finished())
    }

    /// What became of what was written, if that is known by now. Ranks learn of it at different times.
    pub fn poll(&mut self) -> Result<()> {
        if self.is_writing() { Ok(()) } else { self.finish() }
    }

    /// Waits for what is being written, but no longer than this; the next [`finish`](SnapshotWriter::finish) returns its error, if it failed.
    pub fn wait_at_most(&self, most: Duration) {
        let begun = Instant::now();
        while self.is_writing() && begun.elapsed() < most {
            sleep(POLL);
        }
    }

    /// Waits until what was saved is in place.
    ///
    /// # Errors
    /// What failed in the thread, on all ranks. It is returned once.
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

/// A save is written to its end, whatever ends the run; its error is lost then.
impl<R: Runtime> Drop for SnapshotWriter<R> {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}
