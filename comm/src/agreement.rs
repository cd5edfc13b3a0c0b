//! What one rank finds wrong is an error on all; what it answers, all know.

use std::{
    panic::{Location, resume_unwind},
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use numcore::{DType, Error, ErrorKind, Result, Runtime, Shape, Tensor, TensorMut, trace};
use parking_lot::{Condvar, Mutex};

use super::{Collectives, Comm, Communicator, Work, collectives::MakeCall};

/// This rank's own outcome, if every rank's is good; otherwise its own error, or one that names the first rank that has one. Blocks.
#[track_caller]
pub fn all_ok<R: Runtime, T>(comm: &Comm<R>, op: &'static str, own: Result<T>) -> Result<T> {
    let told = own.as_ref().err().map_or(String::new(), |error| error.to_string());
    let all = comm.exchange(told.as_bytes())?;
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

/// The outcome of work that may take longer than a call may, as [`all_ok`] gives it: those that are done wait for those that say, again and again, that they
/// are not. A rank that says nothing is missed as in any call. `work` calls nothing over `comm`. Blocks.
#[track_caller]
pub fn all_ok_after<R: Runtime, T>(comm: &Comm<R>, op: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    if comm.size() == 1 {
        return all_ok(comm, op, work());
    }
    let (at, progress, rank) = (Location::caller(), WorkProgress::default(), trace::rank());
    let tell = || {
        rank.into_iter().for_each(trace::set_rank);
        progress.tell(comm, at)
    };
    let (own, told) = thread::scope(|scope| {
        let done = DoneWhenDropped(&progress);
        let teller = thread::Builder::new().name("work in progress".into()).spawn_scoped(scope, tell);
        let own = match &teller {
            Ok(_) => work(),
            Err(error) => Err(Error::argument(op, format!("no thread to tell the other ranks in: {error}"))),
        };
        drop(done);
        // A panic of an engine is this rank's own: it makes no call after that.
        let ended = |teller: ScopedJoinHandle<'_, _>| teller.join().unwrap_or_else(|panic| resume_unwind(panic));
        (own, teller.map_or_else(|_| progress.tell(comm, at), ended))
    });
    match told {
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
    /// Tells the other ranks, well within the time of a call, whether this rank still works, until none does.
    fn tell<R: Runtime>(&self, comm: &Comm<R>, at: &'static Location<'static>) -> Result<()> {
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

/// Work that ends by a panic is done as well.
struct DoneWhenDropped<'a>(&'a WorkProgress);

impl Drop for DoneWhenDropped<'_> {
    fn drop(&mut self) {
        *self.0.done.lock() = true;
        self.0.changed.notify_all();
    }
}

/// The bytes of every rank, by rank, on rank `root`; none on the others. Blocks.
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

/// Every rank's answer to a question of yes or no. Blocks.
#[track_caller]
pub fn all_gather_bool<R: Runtime>(comm: &Comm<R>, own: bool) -> Result<Vec<bool>> {
    Ok(comm.exchange_equal_at([own.into()], Location::caller())?.iter().map(|answer| answer == &[1]).collect())
}

/// The outcome of this rank's part of something that others take part in: where it fails, they are told, so that nobody waits for this rank
/// until the time is up.
pub fn abort_on_err<R: Runtime, T>(comm: &Comm<R>, own: Result<T>) -> Result<T> {
    own.inspect_err(|error| abort_with(comm, error)).map_err(|error| error.on_rank(comm.world_rank()))
}

/// Aborts with an error of this rank, or of another if it says so: the rank named to all is the one where the failure began.
pub fn abort_with<R: Runtime>(comm: &Comm<R>, error: &Error) {
    match error.kind() {
        ErrorKind::Peer { peer, cause, .. } => comm.abort_for(*peer, cause),
        _ => comm.abort(&error.to_string()),
    }
}
