//! A checkpoint that is written by a thread of its own.

use std::{
    sync::Arc,
    thread::{Builder, JoinHandle, sleep},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use distributed::{
    checkpoint::Folder,
    comm::{Collectives, Comm, Communicator, all_ok},
};
use numcore::{Error, Result, Runtime, trace};

use crate::callback::RunSnapshot;

/// What is written, and what stays.
#[derive(Clone, Debug)]
pub(super) struct WriteJob {
    pub folder: Folder,
    pub snapshot: Arc<RunSnapshot>,
    /// How many of the last checkpoints stay, if not all, and which others.
    pub keep: Option<(usize, Vec<u64>)>,
    /// A name for a step.
    pub mark: Option<(&'static str, u64)>,
}

impl WriteJob {
    fn run<R: Runtime>(&self, comm: &Comm<R>) -> Result<()> {
        let RunSnapshot { step, state, notes } = &*self.snapshot;
        self.folder.save_snapshot(comm, *step, state, notes)?;
        // What fails on rank 0 alone fails on all, which must know the same of what is in place.
        all_ok(comm, "Checkpoints", if comm.rank() == 0 { self.tidy() } else { Ok(()) })
    }

    /// Gives the best one its mark, and removes what does not stay.
    fn tidy(&self) -> Result<()> {
        if let Some((name, step)) = self.mark {
            self.folder.mark(name, step)?;
        }
        self.keep.as_ref().map_or(Ok(()), |(keep, also)| self.folder.prune_except(*keep, also))
    }
}

/// How often a thread is looked at that is waited for, but not for long.
const POLL: Duration = Duration::from_millis(5);

/// Writes checkpoints one after another, while training goes on.
pub(super) struct CheckpointWriter<R: Runtime> {
    /// The ranks, over calls that training makes none of.
    comm: Comm<R>,
    running: Option<JoinHandle<Result<()>>>,
}

impl<R: Runtime> CheckpointWriter<R> {
    /// Every rank calls it.
    pub fn new(comm: &Comm<R>) -> Result<Self> {
        let own = if comm.size() == 1 { Some(comm.clone()) } else { comm.split(Some(0), comm.rank())? };
        let comm = own.ok_or_else(|| Error::internal("Checkpoints", "the ranks split into no group"))?;
        Ok(CheckpointWriter { comm, running: None })
    }

    /// Starts to write, once what was written before is done.
    pub fn start(&mut self, job: WriteJob) -> Result<()> {
        self.finish()?;
        let (comm, rank) = (self.comm.clone(), trace::rank());
        let write = move || {
            rank.into_iter().for_each(trace::set_rank);
            job.run(&comm)
        };
        let thread = Builder::new().name("checkpoint".into()).spawn(write);
        self.running = Some(thread.map_err(|e| Error::argument("Checkpoints", format!("no thread to save in: {e}")))?);
        Ok(())
    }

    /// Writes in the caller's thread.
    pub fn write(&mut self, job: &WriteJob) -> Result<()> {
        self.finish()?;
        job.run(&self.comm)
    }

    /// The outcome of what was written, if that is known by now.
    pub fn poll(&mut self) -> Result<()> {
        if self.running.as_ref().is_some_and(JoinHandle::is_finished) { self.finish() } else { Ok(()) }
    }

    /// Waits for what is being written, but no longer than this; the outcome is that of the next [`finish`](CheckpointWriter::finish).
    pub fn wait_at_most(&self, most: Duration) {
        let begun = Instant::now();
        while self.running.as_ref().is_some_and(|running| !running.is_finished()) && begun.elapsed() < most {
            sleep(POLL);
        }
    }

    /// Waits for what is being written.
    pub fn finish(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        running.join().unwrap_or_else(|panic| {
            let why = distributed::comm::panic_message(&*panic);
            Err(Error::internal("Checkpoints", format!("the thread that saves {why}")))
        })
    }
}

/// A save is written to its end, whatever ends the run.
impl<R: Runtime> Drop for CheckpointWriter<R> {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

/// A name that the ranks of this run share, and no other run has.
pub(super) fn name_of_run<R: Runtime>(comm: &Comm<R>) -> Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let own = format!("{now:x}-{:x}", std::process::id());
    let first = comm.exchange(own.as_bytes())?.swap_remove(0);
    Ok(String::from_utf8_lossy(&first).into_owned())
}
