//! Ranks over NCCL on the emulated GPU, whose work is done at once: addresses are those of the runtime.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use comm::{Collectives, Comm, Communicator, Ranks, ReduceOp, memory};
use distributed::train::{Loss, TrainStep};
use engine_nccl::Nccl;
use nn::{Forward, Init, Linear, ModuleExt};
use numcore::{
    DType, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};
use optim::SgdConfig;
use runtime_cpu::Cpu;
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

/// Runs `program` on ranks over NCCL, each with a queue of its own, whose control plane is threads.
fn on_gpus<T: Send>(n: usize, nccl: &Nccl, program: impl Fn(Comm<Cuda>) -> Result<T> + Sync) -> Vec<T> {
    let run = |control: Comm<Cpu>| program(nccl.communicator(&control, &emulated_gpu::open(&*FOLDER)?)?);
    Ranks::new(n).run(|_| Ok(Cpu::with_threads(1)), run).unwrap_or_else(|e| panic!("{n}: {e}"))
}

fn on_threads<T: Send>(n: usize, program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Vec<T> {
    Ranks::new(n).run(|_| Ok(Cpu::with_threads(1)), program).unwrap_or_else(|e| panic!("{n}: {e}"))
}

/// One of each collective, of a part of larger memory too.
fn collectives<R: Runtime>(comm: Comm<R>) -> Result<Vec<Vec<f32>>> {
    let (n, rank, rt) = (comm.size(), comm.rank(), comm.runtime());
    let own: Vec<f32> = (0..40 * n).map(|i| (i * 7 % 11) as f32 + rank as f32 / 3.0).collect();
    let x = Tensor::from_slice(rt, [40 * n], &own)?;
    let part = x.narrow(0, 8, 5)?;
    let empty = |len: usize| TensorMut::alloc(rt, Shape::new(&[len])?, DType::F32);
    let host = |x: TensorMut<R>| x.freeze()?.to_vec::<f32>();
    let mut all = vec![
        host(comm.all_reduce(memory(&x)?, ReduceOp::Sum)?.wait()?)?,
        host(comm.reduce_scatter(&x, empty(40)?, ReduceOp::Avg)?.wait()?)?,
        host(comm.all_gather(&part, empty(5 * n)?)?.wait()?)?,
        host(comm.broadcast(memory(&x)?, n - 1)?.done()?)?,
        host(comm.all_to_all(&x, empty(40 * n)?)?.wait()?)?,
    ];
    let half = comm.split(Some(rank % 2), n - rank)?.expect("every rank has a color");
    all.push(host(half.all_reduce(memory(&part)?, ReduceOp::Max)?.wait()?)?);
    comm.poll()?;
    Ok(all)
}

#[test]
fn collectives_have_the_bits_of_threads() {
    for n in [1, 2, 4] {
        let expected = on_threads(n, collectives);
        assert_eq!(on_gpus(n, &Nccl::emulated().chunk(64), collectives), expected, "{n} ranks");
    }
}

/// Steps of data parallelism: the losses, and a weight.
fn training<R: Runtime>(comm: Comm<R>) -> Result<(Vec<f64>, Vec<f32>)> {
    let rt = comm.runtime().clone();
    let model = Linear::new(&Init::new(&rt, 3), 6, 4)?;
    let mut step = TrainStep::builder(&comm, &model).optimizer(SgdConfig { lr: 0.1, ..Default::default() }).build()?;
    let x: Vec<f32> = (0..12).map(|i| ((i * 5 + comm.rank() * 3) % 7) as f32 / 7.0).collect();
    let x = autograd::Var::new(Tensor::from_slice(&rt, [2, 6], &x)?);
    let mut losses = Vec::new();
    for _ in 0..3 {
        let metrics = step.step(|_| {
            let y = model.forward(&x)?;
            Loss::sum(y.mul(&y)?.sum_all()?, 2.0)
        })?;
        losses.push(metrics.loss()?);
    }
    let weights = model.parameters().into_iter().map(|p| p.leaf().value()?.to_vec::<f32>());
    Ok((losses, weights.collect::<Result<Vec<_>>>()?.concat()))
}

#[test]
fn ranks_train_as_threads_do() {
    for n in [1, 2, 4] {
        let (gpus, threads) = (on_gpus(n, &Nccl::emulated(), training), on_threads(n, training));
        for ((losses, weights), (expected, kept)) in gpus.iter().zip(&threads) {
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
            assert!(losses.iter().zip(expected).all(|(a, b)| near(*a, *b)), "{n}: {losses:?}, {expected:?}");
            assert!(weights.iter().zip(kept).all(|(a, b)| near(f64::from(*a), f64::from(*b))), "{n}");
        }
        assert!(gpus.iter().all(|rank| rank.1 == gpus[0].1), "{n}: ranks have equal weights");
    }
}
