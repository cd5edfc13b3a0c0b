//! NCCL with one rank, since one GPU allows no more: the library loads, every collective runs, also in a captured step,
//! groups split, and a communicator is aborted.

use std::sync::Arc;

use engine_nccl::Nccl;
use weftgrad::{
    Cpu, Cuda, DType, Error, Flat, FlatLayout, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    distributed::comm::{self, Collectives, Comm, Communicator, NoOpCommunicator, ReduceOp, Work},
    ops::PointwiseOps,
};

use crate::report::Found;

/// The NCCL library; for an emulated GPU the emulated one.
fn library(device: &str) -> Result<Nccl> {
    #[cfg(feature = "emulate")]
    if device == "emulated" {
        let queue = |stream, accesses: &[(u64, bool)], call| emulated_gpu::foreign_call(stream, accesses, call).ok();
        return Ok(Nccl::emulated_on(queue));
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
    let captured = captured(&comm)?;
    checks += captured.0;
    failures.extend(captured.1);
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

/// Compares the launches of a captured step that has collectives with the step itself; returns the number of checks,
/// and the failures.
fn captured(comm: &Comm<Cuda>) -> Result<(usize, Option<String>)> {
    let rt = comm.runtime();
    let layout = FlatLayout::new(DType::F32, [("x".to_string(), Shape::new(&[100_003])?)]);
    let mut x = Flat::zeros_for(rt, MemoryCategory::Activations, layout)?;
    let step = |x: &Flat<Cuda>| {
        let doubled = x.tensor(0)?.mul(2.0)?;
        let sum = comm.all_reduce(comm::memory(&doubled)?, ReduceOp::Sum)?.wait()?.freeze()?;
        let all =
            comm.all_gather(&sum.add(1.0)?, TensorMut::alloc(rt, [100_003].into(), DType::F32)?)?.wait()?.freeze()?;
        comm.broadcast(comm::memory(&all)?, 0)?.wait()?.freeze()
    };
    (0..2).try_for_each(|_| step(&x).map(drop))?;
    let (graph, got) = rt.capture(|| step(&x))?;
    let launches = 3;
    for seed in 0..launches {
        x.overwrite(0, &Tensor::uniform(rt, [100_003], DType::F32, -1.0, 1.0, seed)?)?;
        let want = step(&x)?.to_vec::<f32>()?;
        graph.launch()?;
        if got.to_vec::<f32>()? != want {
            return Ok((launches as usize, Some(format!("launch {seed} of a captured step has other values"))));
        }
    }
    Ok((launches as usize, None))
}
