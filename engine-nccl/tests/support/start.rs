//! Ranks over NCCL on the host. The control plane is threads.

pub use std::marker::Send as Answer;

use engine_nccl::Nccl;
pub use engine_nccl::comm;
use numcore::{Result, Runtime};
use runtime_cpu::Cpu;

use self::comm::{Comm, engine::guarded};
use crate::ranks::Ranks;

pub fn outcomes<R: Runtime, T: Send>(
    ranks: &Ranks,
    runtime: impl Fn(usize) -> Result<R> + Sync,
    program: impl Fn(Comm<R>) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    // Chunks so small that most reductions have several.
    let nccl = Nccl::emulated().chunk(1 << 12);
    ranks.threads().outcomes(|_| Ok(Cpu::with_threads(1)), over(&nccl, runtime, program))
}

/// The program of a rank of the control plane that runs another over NCCL.
pub fn over<R: Runtime, T>(
    nccl: &Nccl,
    runtime: impl Fn(usize) -> Result<R>,
    program: impl Fn(Comm<R>) -> Result<T>,
) -> impl Fn(Comm<Cpu>) -> Result<T> {
    move |control| {
        let comm = nccl.communicator(&control, &runtime(control.rank())?)?;
        // Who drops it has left.
        drop(control);
        guarded(&comm, &program)
    }
}
