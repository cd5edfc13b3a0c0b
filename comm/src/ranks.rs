//! Runs of a program on every rank of a world of threads.

use std::panic::{AssertUnwindSafe, catch_unwind};

use numcore::{Error, ErrorKind, Result, Runtime};

use super::{
    Comm, Deadlines, Places, ThreadCommunicator, abort_with,
    failure::{LEFT, panic_message},
};
use crate::sync;

/// The options of a world of threads.
#[doc(alias("create_local_comm_pair"))]
#[derive(Clone, Debug)]
pub struct Ranks {
    size: usize,
    deadlines: Deadlines,
    places: Places,
}

impl Ranks {
    /// A world of `size` ranks, with the default [`Deadlines`].
    pub fn new(size: usize) -> Self {
        Ranks { size, deadlines: Deadlines::default(), places: Places::Same }
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Sets the time that a call may take before every rank gets an error.
    pub fn timeout(mut self, deadlines: impl Into<Deadlines>) -> Self {
        self.deadlines = deadlines.into();
        self
    }

    /// Lets ranks make matching calls from different places in the program.
    pub fn any_place(mut self) -> Self {
        self.places = Places::Any;
        self
    }

    /// Runs `program` on every rank, each in a thread of its own with a runtime of its own, and returns the results, by
    /// rank.
    ///
    /// A rank that fails or panics ends the others' calls with an error that names it, and its own error is returned.
    pub fn run<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        all_or_first_error(self.outcomes(runtime, program)?)
    }

    /// Runs `program` as [`run`](Ranks::run) does, and returns every rank's own outcome, by rank.
    pub fn outcomes<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<Result<T>>> {
        let runtimes = (0..self.size).map(runtime).collect::<Result<Vec<R>>>()?;
        let comms = ThreadCommunicator::members(runtimes, self.deadlines, self.places)?;
        let outcomes = sync::scope(|scope| {
            let start = |(rank, comm): (usize, Comm<R>)| {
                let program = &program;
                sync::spawn_in(scope, format!("rank-{rank}"), move || {
                    numcore::trace::set_rank(rank);
                    guarded(&comm, program)
                })
            };
            let threads: Vec<_> = comms.into_iter().enumerate().map(start).collect();
            threads.into_iter().enumerate().map(|(rank, thread)| outcome(rank, thread)).collect::<Vec<_>>()
        });
        Ok(with_causes(outcomes))
    }
}

/// Runs a program on this rank of a world: an error that ends it, or a panic, reaches the other ranks.
pub fn guarded<R: Runtime, T>(comm: &Comm<R>, program: impl FnOnce(Comm<R>) -> Result<T>) -> Result<T> {
    let peer = comm.world_rank();
    match catch_unwind(AssertUnwindSafe(|| program(comm.clone()))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            abort_with(comm, &error);
            Err(error)
        }
        Err(panic) => {
            let cause = panic_message(&*panic);
            comm.abort(&cause);
            Err(Error::from(ErrorKind::Peer { op: "program", peer, cause }).on_rank(peer))
        }
    }
}

fn outcome<T>(rank: usize, thread: std::io::Result<sync::ScopedJoinHandle<'_, Result<T>>>) -> Result<T> {
    let failed = |cause: String| Error::from(ErrorKind::Peer { op: "Ranks::run", peer: rank, cause }).on_rank(rank);
    match thread.map(sync::ScopedJoinHandle::join) {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(panic)) => Err(failed(panic_message(&*panic))),
        Err(e) => Err(failed(format!("no thread: {e}"))),
    }
}

/// Adds causes to the outcomes of a world's ranks. A rank that fails drops its groups before the world gets its error,
/// so other ranks see only that it left. They get the error added.
pub fn with_causes<T>(outcomes: Vec<Result<T>>) -> Vec<Result<T>> {
    let own = |outcome: &Result<T>| outcome.as_ref().err().filter(|error| is_own(error)).map(Error::to_string);
    let causes: Vec<Option<String>> = outcomes.iter().map(own).collect();
    let with_cause = |error: Error| match (error.kind(), error.rank()) {
        (ErrorKind::Peer { op, peer, cause }, Some(rank)) if rank != *peer && cause.starts_with(LEFT) => {
            let Some(Some(why)) = causes.get(*peer) else { return error };
            Error::from(ErrorKind::Peer { op, peer: *peer, cause: format!("{why}; {cause}") }).on_rank(rank)
        }
        _ => error,
    };
    outcomes.into_iter().map(|outcome| outcome.map_err(with_cause)).collect()
}

/// Returns all ranks' values, or the error of a rank that failed by itself, if there is one, or else the first error.
pub fn all_or_first_error<T>(mut outcomes: Vec<Result<T>>) -> Result<Vec<T>> {
    if let Some(first) = outcomes.iter().position(|o| o.as_ref().is_err_and(is_own)) {
        outcomes.swap(0, first);
    }
    outcomes.into_iter().collect()
}

/// Tells whether a rank failed by itself, not because another did.
fn is_own(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Peer { peer, .. } => error.rank() == Some(*peer),
        _ => true,
    }
}
