//! NCCL with one rank, since one GPU allows no more: the library loads, every collective runs, groups split, and a
//! communicator is aborted.

use std::sync::Arc;

use engine_nccl::Nccl;
use weftgrad::{
    Cpu, Cuda, DType, Error, Result, Runtime, Tensor, TensorMut,
    distributed::comm::{Collectives, Comm, Communicator, NoOpCommunicator, ReduceOp, Work},
    ops::PointwiseOps,
};

use crate::report::Found;

/// The NCCL library; for an emulated GPU the emulated one.
fn library(device: &str) -> Result<Nccl> {
    #[cfg(feature = "emulate")]
    if device == "emulated" {
        return Ok(Nccl::emulated());
    }
    let _ = device;
    Nccl::load()
}

pub(crate) fn run(rt: &Cuda, device: &str) -> Result<Found> {
    let nccl = library(device)?;
    let control: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&Cpu::with_threads(1)));
    let comm = nccl.communicator(&control, rt)?;
    let mut failures = Vec::new();
    let mut checks = 0;
    for dtype in [DType::F32, DType::BF16] {
        let x = Tensor::uniform(rt, [100_003], DType::F32, -1.0, 1.0, 1)?.to_dtype(dtype)?;
        // A copy with memory of its own, which nothing else holds.
        let copy = || x.copy()?.try_mut().map_err(|_| Error::state("a copy", "has an owner beside this one"));
        let empty = || TensorMut::alloc(rt, [100_003].into(), dtype);
        let mut same = |name: &str, work: Result<Work<TensorMut<Cuda>>>| -> Result<()> {
            checks += 1;
            match work.and_then(|work| work.done()?.freeze()) {
                Err(error) => failures.push(format!("{name} of {dtype}: {error}")),
                Ok(got) if got.to_f64s()? != x.to_f64s()? => {
                    failures.push(format!("{name} of {dtype} has other values"))
                }
                Ok(_) => {}
            }
            Ok(())
        };
        same("all_reduce", comm.all_reduce(copy()?, ReduceOp::Sum))?;
        same("broadcast", comm.broadcast(copy()?, 0))?;
        same("all_gather", comm.all_gather(&x, empty()?))?;
        same("reduce_scatter", comm.reduce_scatter(&x, empty()?, ReduceOp::Sum))?;
        same("all_to_all", comm.all_to_all(&x, empty()?))?;
    }
    comm.barrier()?;
    let group = comm.split(Some(0), 0)?;
    let whole = group.as_ref().is_some_and(|group| group.size() == 1);
    failures.extend((!whole).then(|| "a group of one rank was not split off".to_string()));
    rt.synchronize()?;
    comm.abort("the check is over");
    let aborted = comm.barrier().is_err();
    failures.extend((!aborted).then(|| "a call after the abort succeeded".to_string()));
    Ok(Found::checks(checks + 2, failures).with("version", nccl.version()))
}
