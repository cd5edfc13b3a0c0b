//! The ranks of an engine, in place of `comm::Ranks`: tests that were written for threads run on them by the same
//! source.
//!
//! A suite's module `start` has the engine: `outcomes`, which starts the ranks, and `Answer`, the bound of a program's
//! results.

use numcore::{Result, Runtime};

use crate::start::{
    Answer,
    comm::{self, Comm, Deadlines, Places, engine::all_or_first_error},
};

/// The options of a world.
#[derive(Clone, Debug)]
pub struct Ranks {
    pub size: usize,
    pub timeout: Deadlines,
    pub places: Places,
}

impl Ranks {
    pub fn new(size: usize) -> Self {
        Ranks { size, timeout: Deadlines::default(), places: Places::Same }
    }

    pub fn timeout(self, timeout: impl Into<Deadlines>) -> Self {
        Ranks { timeout: timeout.into(), ..self }
    }

    pub fn any_place(self) -> Self {
        Ranks { places: Places::Any, ..self }
    }

    pub fn run<R: Runtime, T: Answer>(
        &self,
        runtime: impl Fn(usize) -> Result<R> + Sync,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        all_or_first_error(self.outcomes(runtime, program)?)
    }

    pub fn outcomes<R: Runtime, T: Answer>(
        &self,
        runtime: impl Fn(usize) -> Result<R> + Sync,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<Result<T>>> {
        crate::start::outcomes(self, runtime, program)
    }

    /// The same world of threads.
    pub fn threads(&self) -> comm::Ranks {
        let threads = comm::Ranks::new(self.size).timeout(self.timeout);
        if self.places == Places::Any { threads.any_place() } else { threads }
    }
}
