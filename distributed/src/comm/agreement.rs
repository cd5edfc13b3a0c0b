//! What one rank finds wrong is an error on all; what it answers, all know.

use numcore::{ErrorKind, Result, Runtime};

use super::{Collectives, Comm, Communicator};

/// This rank's own outcome, if every rank's is good; otherwise its own error, or one that names the first rank that has one. Blocks.
#[track_caller]
pub(crate) fn unanimous<R: Runtime, T>(comm: &Comm<R>, op: &'static str, own: Result<T>) -> Result<T> {
    let told = own.as_ref().err().map_or(String::new(), |error| error.to_string());
    let all = comm.exchange(told.as_bytes())?;
    let failed = all.iter().position(|cause| !cause.is_empty());
    match (own, failed) {
        (Err(error), _) => Err(error.on_rank(comm.rank())),
        (Ok(_), Some(peer)) => {
            let cause = String::from_utf8_lossy(&all[peer]).into_owned();
            Err(numcore::Error::from(ErrorKind::Peer { op, peer, cause }).on_rank(comm.rank()))
        }
        (Ok(value), None) => Ok(value),
    }
}

/// Every rank's answer to a question of yes or no. Blocks.
#[track_caller]
pub(crate) fn answers<R: Runtime>(comm: &Comm<R>, own: bool) -> Result<Vec<bool>> {
    Ok(comm.exchange(&[own.into()])?.iter().map(|answer| answer == &[1]).collect())
}

/// The outcome of this rank's part of something that others take part in: where it fails, they are told, so that nobody waits for this rank
/// until the time is up.
pub(crate) fn told<R: Runtime, T>(comm: &Comm<R>, own: Result<T>) -> Result<T> {
    own.inspect_err(|error| comm.abort(&error.to_string())).map_err(|error| error.on_rank(comm.rank()))
}
