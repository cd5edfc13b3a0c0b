//! Agreement between ranks: an error of one rank becomes an error on all, and answers are gathered on all.

use std::{
    io,
    panic::{Location, resume_unwind},
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use numcore::{DType, Error, ErrorKind, Result, Runtime, Shape, Tensor, TensorMut, trace};
use parking_lot::{Condvar, Mutex};

use super::{Collectives, Comm, Communicator, Work, communicator::MakeCall};

/// Returns this rank's own outcome if every rank succeeded; otherwise its own error, or one that names the first rank
/// that failed. Blocks.
#[track_caller]
pub fn all_ok<R: Runtime, T>(comm: &Comm<R>, op: &'static str, own: Result<T>) -> Result<T> {
    let message = own.as_ref().err().map_or(String::new(), |error| error.to_string());
    let all = comm.exchange(message.as_bytes())?;
    let failed = all.iter().position(|cause| !cause.is_empty());
    match (own, failed) {
        (Err(error), _) => Err(error.on_rank(comm.world_rank())),
        (Ok(_), Some(failed)) => {
            let (peer, cause) = (comm.members()[failed], String::from_utf8_lossy(&all[failed]).into_owned());
            Err(Error::from(ErrorKind::Peer { op, peer, cause }).on_rank(comm.world_rank()))
        }
        (Ok(value), None) => Ok(value),
    }
}

/// Runs work that may take longer than the timeout of a call, and returns its outcome as [`all_ok`] does. While any
/// rank still works, ranks keep exchanging one byte; a rank that stops exchanging is missing as in any call. `work`
/// makes no calls over `comm`. Blocks.
#[track_caller]
pub fn all_ok_after<R: Runtime, T>(comm: &Comm<R>, op: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    if comm.size() == 1 {
        return all_ok(comm, op, work());
    }
    let (at, progress, rank) = (Location::caller(), WorkProgress::default(), trace::rank());
    let report = || {
        rank.into_iter().for_each(trace::set_rank);
        progress.report_progress(comm, at)
    };
    let (own, reported) = thread::scope(|scope| {
        let done = DoneWhenDropped(&progress);
        let reporter = thread::Builder::new().name("work in progress".into()).spawn_scoped(scope, report);
        let own = match &reporter {
            Ok(_) => work(),
            Err(error) => Err(Error::io("thread `work in progress`", io::Error::new(error.kind(), error.to_string()))),
        };
        drop(done);
        // A panic of an engine is this rank's own: it makes no call after that.
        let ended = |reporter: ScopedJoinHandle<'_, _>| reporter.join().unwrap_or_else(|panic| resume_unwind(panic));
        (own, reporter.map_or_else(|_| progress.report_progress(comm, at), ended))
    });
    match reported {
        Ok(()) => all_ok(comm, op, own),
        // The world has failed, perhaps by this rank's own error.
        Err(error) => own.and(Err(error)),
    }
}

/// The state of a rank's work: done or not.
#[derive(Default)]
struct WorkProgress {
    done: Mutex<bool>,
    changed: Condvar,
}

impl WorkProgress {
    /// Exchanges with the other ranks, well within the timeout of a call, whether this rank still works, until none
    /// does.
    fn report_progress<R: Runtime>(&self, comm: &Comm<R>, at: &'static Location<'static>) -> Result<()> {
        let most = (comm.timeout() / 4).min(Duration::from_secs(15));
        loop {
            let works = {
                let mut done = self.done.lock();
                self.changed.wait_while_for(&mut done, |done| !*done, most);
                !*done
            };
            // Done is 0: between ranks of a runtime without values nothing arrives, which reads as zeros.
            if comm.exchange_equal_at([u8::from(works)], at)?.iter().all(|works| *works == [0]) {
                return Ok(());
            }
        }
    }
}

/// A guard that marks work as done when it ends, also by a panic.
struct DoneWhenDropped<'a>(&'a WorkProgress);

impl Drop for DoneWhenDropped<'_> {
    fn drop(&mut self) {
        *self.0.done.lock() = true;
        self.0.changed.notify_all();
    }
}

/// Gathers the bytes of every rank, by rank, on rank `root`; returns none on the other ranks. Blocks.
#[track_caller]
pub fn gather_bytes<R: Runtime>(comm: &Comm<R>, root: usize, own: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
    let rt = comm.runtime();
    let lengths = comm.exchange_equal_at(own.len().to_le_bytes(), Location::caller())?;
    if comm.rank() != root {
        comm.send(&Tensor::from_slice(rt, [own.len()], own)?, root)?.wait()?;
        return Ok(None);
    }
    let receive = |(from, &length): (usize, &[u8; size_of::<usize>()])| {
        let arrives = TensorMut::alloc(rt, Shape::new(&[usize::from_le_bytes(length)])?, DType::U8)?;
        if from == root { Ok(None) } else { comm.recv(arrives, from).map(Some) }
    };
    let works = lengths.iter().enumerate().map(receive).collect::<Result<Vec<_>>>()?;
    let taken = |work: Option<Work<TensorMut<R>>>| work.map_or(Ok(own.to_vec()), |w| w.wait()?.freeze()?.to_vec());
    works.into_iter().map(taken).collect::<Result<_>>().map(Some)
}

/// Gathers every rank's bool, by rank. Blocks.
#[track_caller]
pub fn all_gather_bool<R: Runtime>(comm: &Comm<R>, own: bool) -> Result<Vec<bool>> {
    Ok(comm.exchange_equal_at([own.into()], Location::caller())?.iter().map(|answer| answer == &[1]).collect())
}

/// Aborts the communicator if this rank's part of a joint operation failed, so that no other rank waits for it until
/// the timeout. Returns the outcome, its error with this rank's number.
pub fn abort_on_err<R: Runtime, T>(comm: &Comm<R>, own: Result<T>) -> Result<T> {
    own.inspect_err(|error| abort_with(comm, error)).map_err(|error| error.on_rank(comm.world_rank()))
}

/// Aborts with an error of this rank, or of another rank that the error names: all ranks get the rank at which the
/// failure began.
pub fn abort_with<R: Runtime>(comm: &Comm<R>, error: &Error) {
    match error.kind() {
        ErrorKind::Peer { peer, cause, .. } => comm.abort_for(*peer, cause),
        _ => comm.abort(&error.to_string()),
    }
}
