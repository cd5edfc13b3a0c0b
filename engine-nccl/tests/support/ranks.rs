//! `Ranks` over NCCL on the host: test programs that were written for threads run by the same source. The control plane is threads.

use std::time::Duration;

use engine_nccl::{
    Nccl,
    comm::{
        Comm, Ranks as Threads,
        engine::{all_or_first_error, guarded, with_causes},
    },
};
use numcore::{Result, Runtime};
use runtime_cpu::Cpu;

/// What tests know of a world: as `comm::Ranks`.
#[derive(Clone, Debug)]
pub struct Ranks {
    threads: Threads,
    nccl: Nccl,
}

impl Ranks {
    pub fn new(size: usize) -> Self {
        // Chunks so small that most reductions have several.
        Ranks { threads: Threads::new(size), nccl: Nccl::emulated().chunk(1 << 12) }
    }

    pub fn over(size: usize, nccl: Nccl) -> Self {
        Ranks { threads: Threads::new(size), nccl }
    }

    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.threads = self.threads.timeout(timeout);
        self
    }

    pub fn any_place(mut self) -> Self {
        self.threads = self.threads.any_place();
        self
    }

    pub fn run<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R> + Sync,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        all_or_first_error(self.outcomes(runtime, program)?)
    }

    pub fn outcomes<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R> + Sync,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<Result<T>>> {
        let outcomes = self.threads.outcomes(
            |_| Ok(Cpu::with_threads(1)),
            |control| {
                let comm = self.nccl.communicator(&control, &runtime(control.rank())?)?;
                // Who drops it has left.
                drop(control);
                guarded(&comm, &program)
            },
        )?;
        Ok(with_causes(outcomes))
    }
}
