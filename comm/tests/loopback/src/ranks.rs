//! `Ranks` that files join, as `comm::Ranks` are joined by threads.

use std::{thread, time::Duration};

use numcore::{Result, Runtime};
use real_comm::{
    Comm, Places,
    engine::{all_or_first_error, guarded, with_causes},
};

pub struct Ranks {
    size: usize,
    timeout: Duration,
    places: Places,
}

impl Ranks {
    pub fn new(size: usize) -> Self {
        Ranks { size, timeout: Duration::from_secs(60), places: Places::Same }
    }

    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub fn any_place(mut self) -> Self {
        self.places = Places::Any;
        self
    }

    pub fn run<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        all_or_first_error(self.outcomes(runtime, program)?)
    }

    pub fn outcomes<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<Result<T>>> {
        let runtimes = (0..self.size).map(runtime).collect::<Result<Vec<R>>>()?;
        let comms = crate::files::world(runtimes, self.timeout, self.places)?;
        let program = &program;
        let outcomes = thread::scope(|scope| {
            let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || guarded(&comm, program))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("programs are guarded")).collect()
        });
        Ok(with_causes(outcomes))
    }
}
