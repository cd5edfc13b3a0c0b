//! Ranks over NCCL, each on an emulated GPU of its own, whose streams have NCCL's calls among their work.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock, time::Duration};

use autograd::{manual_seed, next_seed, random_state, set_random_state};
use comm::{Collectives, Comm, Communicator, Ranks, ReduceOp, memory};
use distributed::{
    buckets::{BucketLimits, BucketOptions, GradCompression},
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::{BufferSync, Loss, TrainStep},
    zero::ZeroStage,
};
use emulated_gpu::AccessOrder;
use engine_nccl::Nccl;
use nn::{Dropout, Forward, Init, Linear, ModuleExt, Sequential, parallel::TensorPlan};
use numcore::{
    DType, Flat, FlatLayout, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};
use optim::{AdamW, AdamWConfig, Cosine, SgdConfig};
use runtime_cpu::Cpu;
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

/// NCCL on the streams of emulated GPUs.
fn nccl() -> Nccl {
    Nccl::emulated_on(|stream, accesses, call| emulated_gpu::foreign_call(stream, accesses, call).ok())
}

/// Runs `program` on ranks over NCCL, whose control plane is threads.
fn on_gpus<T: Send>(n: usize, nccl: &Nccl, program: impl Fn(Comm<Cuda>) -> Result<T> + Sync) -> Vec<T> {
    on_watched(n, nccl, |comm, _| program(comm))
}

/// Runs `program` as [`on_gpus`]; accesses that no stream or event orders are failures.
fn ordered<T: Send>(n: usize, nccl: &Nccl, program: impl Fn(Comm<Cuda>) -> Result<T> + Sync) -> Vec<T> {
    on_watched(n, nccl, |comm, order| {
        let result = program(comm)?;
        assert_eq!(order.complaints(), Vec::<String>::new());
        Ok(result)
    })
}

fn on_watched<T: Send>(
    n: usize,
    nccl: &Nccl,
    program: impl Fn(Comm<Cuda>, &AccessOrder) -> Result<T> + Sync,
) -> Vec<T> {
    let run = |control: Comm<Cpu>| {
        let (gpu, order) = emulated_gpu::watched(&*FOLDER)?;
        program(nccl.communicator(&control, &gpu)?, &order)
    };
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
        assert_eq!(ordered(n, &nccl().chunk(64), collectives), expected, "{n} ranks");
    }
}

/// Every kind of call in a captured step, with two communicators: launches give what calls with the same data give.
#[test]
fn a_captured_step_has_collectives() {
    let step = |comm: &Comm<Cuda>, half: &Comm<Cuda>, x: &Tensor<Cuda>| {
        let (n, rt) = (comm.size(), comm.runtime());
        let empty = |len: usize| TensorMut::alloc(rt, Shape::new(&[len])?, DType::F32);
        let sum = comm.all_reduce(memory(&x.mul(2.0)?)?, ReduceOp::Sum)?.wait()?.freeze()?;
        let part = comm.reduce_scatter(&sum, empty(40)?, ReduceOp::Avg)?.wait()?.freeze()?;
        let all = comm.all_gather(&part.narrow(0, 8, 5)?, empty(5 * n)?)?.wait()?.freeze()?;
        let most = half.all_reduce(memory(&all)?, ReduceOp::Max)?.wait()?.freeze()?;
        let turned = comm.all_to_all(&sum, empty(40 * n)?)?.wait()?.freeze()?;
        Ok([part, all, most, turned])
    };
    let program = |captured: bool| {
        move |comm: Comm<Cuda>| {
            let (n, rank, rt) = (comm.size(), comm.rank(), comm.runtime().clone());
            let half = comm.split(Some(rank % 2), n - rank)?.expect("every rank has a color");
            let layout = FlatLayout::new(DType::F32, [("x".to_string(), Shape::new(&[40 * n])?)]);
            let mut x = Flat::zeros_for(&rt, MemoryCategory::Activations, layout)?;
            (0..2).try_for_each(|_| step(&comm, &half, &x.tensor(0)?).map(drop))?;
            let graph = if captured { Some(rt.capture(|| step(&comm, &half, &x.tensor(0)?))?) } else { None };
            let mut all = Vec::new();
            let mut comms = Some((comm, half));
            for round in 0..4 {
                let own: Vec<f32> = (0..40 * n).map(|i| ((i + rank) * 7 % 11) as f32 + round as f32 / 3.0).collect();
                x.overwrite(0, &Tensor::from_slice(&rt, [40 * n], &own)?)?;
                // A step outlives its communicators.
                comms = comms.filter(|_| !captured || round < 3);
                let results = match (&graph, &comms) {
                    (Some((graph, results)), _) => graph.launch().map(|()| results.clone())?,
                    (None, Some((comm, half))) => step(comm, half, &x.tensor(0)?)?,
                    (None, None) => unreachable!("without a captured step the communicators are kept"),
                };
                all.push(results.iter().map(|x| x.to_vec::<f32>()).collect::<Result<Vec<_>>>()?);
                // Calls and launches may follow one another.
                comms.iter().try_for_each(|(comm, _)| comm.barrier())?;
            }
            Ok(all)
        }
    };
    for n in [1, 2, 3, 4] {
        let expected = ordered(n, &nccl().chunk(64), program(false));
        assert!(expected[0][0] != expected[0][1] && expected[0][1] != expected[0][2]);
        assert_eq!(ordered(n, &nccl().chunk(64), program(true)), expected, "{n} ranks");
        let native = nccl().native_sums(true);
        assert_eq!(ordered(n, &native, program(true)), ordered(n, &native, program(false)), "{n} ranks");
    }
}

/// Calls follow one another, each on new memory. In a captured step too the next one uses what the last one gave back.
#[test]
fn memory_of_calls_is_used_again_in_a_step() {
    let reserved = on_gpus(2, &nccl().native_sums(true), |comm| {
        let rt = comm.runtime();
        let step = || {
            for _ in 0..6 {
                let x = TensorMut::zeros(rt, [1 << 20].into(), DType::F32)?;
                drop(comm.all_reduce(x, ReduceOp::Max)?.wait()?);
            }
            Ok(())
        };
        (0..2).try_for_each(|_| step())?;
        let before = rt.memory().reserved;
        let (graph, ()) = rt.capture(step)?;
        graph.launch()?;
        rt.synchronize()?;
        Ok((before, rt.memory().reserved))
    });
    for (before, after) in reserved {
        assert!(before == after && before < 6 * (4 << 20), "{before}, {after}");
    }
}

/// Steps of two micro-batches with clipping, dropout, Adam and a schedule, with layers cut over `tensor` ranks: the losses,
/// and the parameters.
fn steps(comm: Comm<Cuda>, tensor: usize, captured: bool) -> Result<Vec<Vec<f64>>> {
    let rt = comm.runtime().clone();
    manual_seed(9);
    let init = Init::new(&rt, 3);
    let model =
        Sequential::new().push(Linear::new(&init, 6, 8)?).push(Dropout::new(0.2)?).push(Linear::new(&init, 8, 4)?);
    let axes = [(Axis::Data, comm.size() / tensor), (Axis::Tensor, tensor)];
    let mesh = Mesh::new(&comm, ParallelPlan::of(axes)?)?;
    mesh.parallelize(&model, &TensorPlan::new().column("0").row("2"))?;
    let config = AdamWConfig { lr: 0.05, weight_decay: 0.1, ..Default::default() };
    let adam = AdamW::new(&model, config)?.scheduled(Cosine { t_max: 40, eta_min: 0.0 }).capturable();
    let buckets = BucketOptions { limits: Some(BucketLimits { first: 64, others: 64 }), ..BucketOptions::default() };
    let builder = TrainStep::builder(&mesh, &model).optimizer(adam).max_norm(0.5).buckets(buckets);
    let mut step = builder.accumulation(2).build()?;
    let share = step.ranks().share.index;
    let x = |k: usize| {
        let x: Vec<f32> = (0..12).map(|i| ((i * 5 + share * 3 + k) % 7) as f32 / 7.0).collect();
        Tensor::from_slice(&rt, [2, 6], &x).map(autograd::Var::new)
    };
    let x = [x(0)?, x(1)?];
    let take = |step: &mut TrainStep<Cuda>| {
        step.step(|k| Loss::sum(model.forward(&x[k])?.square()?.sum_all()?, 2.0 + k as f64))
    };
    (0..2).try_for_each(|_| take(&mut step).map(drop))?;
    let before = random_state();
    let graph = if captured { Some(rt.capture(|| take(&mut step))?) } else { None };
    set_random_state(before);
    let mut results = Vec::new();
    for _ in 0..5 {
        let metrics = match &graph {
            Some((graph, metrics)) => {
                step.advance()?;
                graph.launch_with_seeds(next_seed)?;
                metrics.clone()
            }
            None => take(&mut step)?,
        };
        results.push(vec![metrics.loss()?, metrics.grad_norm()?.unwrap_or_default(), step.global_step() as f64]);
    }
    results.extend(model.parameters().into_iter().map(|p| p.leaf().value()?.to_f64s()).collect::<Result<Vec<_>>>()?);
    Ok(results)
}

/// Not watched: a bucket in flight and the gradient that is computed meanwhile are pieces of one block, which the
/// detector does not tell apart.
#[test]
fn captured_steps_train_as_steps_do() {
    for (n, tensor) in [(1, 1), (2, 1), (2, 2), (4, 2)] {
        let expected = on_gpus(n, &nccl(), |comm| steps(comm, tensor, false));
        assert!(expected[0][..5].windows(2).all(|two| two[0][0] != two[1][0]));
        assert_eq!(on_gpus(n, &nccl(), |comm| steps(comm, tensor, true)), expected, "{n} ranks, {tensor} of tensor");
    }
}

/// What each rank of two finds, of which rank 1 does something else than rank 0.
fn differing<T: Send>(program: impl Fn(&Comm<Cuda>, &Tensor<Cuda>) -> Result<T> + Sync) -> Vec<String> {
    let (ranks, nccl) = (Ranks::new(2).timeout(Duration::from_secs(2)), nccl());
    let run = |control: Comm<Cpu>| {
        let (gpu, _) = emulated_gpu::watched(&*FOLDER)?;
        let comm = nccl.communicator(&control, &gpu)?;
        let x = Tensor::from_slice(&gpu, [100], &[1.0f32; 100])?;
        (0..2).try_for_each(|_| summed(&comm, &x).map(drop))?;
        program(&comm, &x)
    };
    let outcomes = ranks.outcomes(|_| Ok(Cpu::with_threads(1)), run).expect("two ranks");
    outcomes.into_iter().map(|outcome| outcome.err().map_or("no error".into(), |error| error.to_string())).collect()
}

fn summed(comm: &Comm<Cuda>, x: &Tensor<Cuda>) -> Result<Tensor<Cuda>> {
    comm.all_reduce(memory(x)?, ReduceOp::Sum)?.wait()?.freeze()
}

#[test]
fn ranks_that_differ_in_captures_and_launches_are_told() {
    let one_captures = differing(|comm, x| {
        if comm.rank() == 0 {
            return comm.runtime().capture(|| summed(comm, x)).map(drop);
        }
        summed(comm, x)?.to_vec::<f32>().map(drop)
    });
    let other_step = differing(|comm, x| {
        let (first, _) = comm.runtime().capture(|| summed(comm, x))?;
        let (second, _) = comm.runtime().capture(|| summed(comm, x))?;
        [first, second][comm.rank()].launch()
    });
    for error in one_captures.iter().chain(&other_step) {
        assert!(error.contains("captured step"), "{error}");
    }
    let one_launches = differing(|comm, x| {
        let (graph, y) = comm.runtime().capture(|| summed(comm, x))?;
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_secs(4));
            return Ok(());
        }
        graph.launch()?;
        y.to_vec::<f32>().map(drop)
    });
    assert!(one_launches[0].contains("captured step") && one_launches[0].contains("rank 1"), "{one_launches:?}");
    let one_fails = differing(|comm, x| {
        let (graph, y) = comm.runtime().capture(|| summed(comm, x))?;
        if comm.rank() == 1 {
            comm.abort("rank 1 has had enough");
            return Ok(());
        }
        graph.launch()?;
        y.to_vec::<f32>().map(drop)
    });
    assert!(one_fails[0].contains("had enough"), "{one_fails:?}");
}

/// A launch is watched as a call is: a rank whose host does something else goes on with its part.
#[test]
fn a_launch_is_watched() {
    let (read, told) = std::sync::mpsc::channel();
    let told = std::sync::Mutex::new(told);
    let nccl = nccl();
    on_gpus(2, &nccl, |comm| {
        let x = Tensor::from_slice(comm.runtime(), [100], &[1.0f32; 100])?;
        (0..2).try_for_each(|_| summed(&comm, &x).map(drop))?;
        let (graph, y) = comm.runtime().capture(|| summed(&comm, &x))?;
        graph.launch()?;
        if comm.rank() == 1 {
            let told = told.lock().expect("a lock").recv_timeout(Duration::from_secs(30));
            assert!(told.is_ok(), "rank 0 waits for the GPU of rank 1");
            return Ok(());
        }
        assert_eq!(y.to_vec::<f32>()?, [2.0; 100]);
        read.send(()).expect("rank 1 waits");
        Ok(())
    });
}

#[test]
fn what_a_captured_step_cannot_do_is_refused() {
    let errors = on_gpus(2, &nccl(), |comm| {
        let x = Tensor::from_slice(comm.runtime(), [100], &[1.0f32; 100])?;
        (0..2).try_for_each(|_| summed(&comm, &x).map(drop))?;
        let (graph, errors) = comm.runtime().capture(|| {
            let done = comm.all_reduce(memory(&x)?, ReduceOp::Sum)?.done().err();
            let exchanged = comm.exchange(&[1u8]).err();
            let split = comm.split(Some(0), 0).err();
            let work = comm.all_reduce(memory(&x)?, ReduceOp::Sum)?;
            Ok((done, exchanged, split, work))
        })?;
        let (done, exchanged, split, work) = errors;
        let outside = work.wait().err();
        graph.launch()?;
        let errors = [done, exchanged, split, outside].map(|e| e.map_or("no error".into(), |e| e.to_string()));
        comm.barrier()?;
        Ok(errors)
    });
    for [done, exchanged, split, outside] in errors {
        assert!(done.contains("all_reduce") && done.contains("after a launch"), "{done}");
        assert!(exchanged.contains("the host cannot take part in a captured step"), "{exchanged}");
        assert!(split.contains("the host cannot take part in a captured step"), "{split}");
        assert!(outside.contains("nothing outside of it can wait for"), "{outside}");
    }
}

/// Strategies whose steps leave calls in flight, or keep what the host exchanges, are not captured.
#[test]
fn only_replicated_parameters_train_in_captured_steps() {
    let half = BucketOptions { compression: GradCompression::Bf16, ..BucketOptions::default() };
    let own = BucketOptions::default();
    let choices = [
        (ZeroStage::Optimizer, own.clone(), BufferSync::Own),
        (ZeroStage::None, half, BufferSync::Own),
        (ZeroStage::None, own, BufferSync::Broadcast),
    ];
    for (stage, buckets, sync) in choices {
        let program = |comm: Comm<Cuda>| {
            let model = Linear::new(&Init::new(comm.runtime(), 3), 6, 4)?;
            let builder = TrainStep::builder(&comm, &model).optimizer(SgdConfig::default()).zero(stage).buffers(sync);
            let mut step = if stage == ZeroStage::None { builder.buckets(buckets.clone()) } else { builder }.build()?;
            let x = autograd::Var::new(Tensor::from_slice(comm.runtime(), [2, 6], &[0.5f32; 12])?);
            let error = step.advance().expect_err("no step is captured").to_string();
            assert!(error.contains("TrainStep::advance") && error.contains("cannot be captured"), "{error}");
            let mut take = || step.step(|_| Loss::sum(model.forward(&x)?.square()?.sum_all()?, 2.0));
            (0..2).try_for_each(|_| take().map(drop))?;
            comm.runtime().capture(take).map(drop)
        };
        let run = |control: Comm<Cpu>| {
            let (gpu, _) = emulated_gpu::watched(&*FOLDER)?;
            program(nccl().communicator(&control, &gpu)?)
        };
        let outcomes = Ranks::new(1).outcomes(|_| Ok(Cpu::with_threads(1)), run).expect("one rank");
        let error = outcomes[0].as_ref().err().map_or("no error".into(), |error| error.to_string());
        assert!(error.contains("cannot be captured") && error.contains("replicated"), "{error}");
    }
}

#[test]
fn ranks_that_are_threads_take_no_part_in_captured_steps() {
    let program = |comm: Comm<Cuda>| {
        let x = Tensor::from_slice(comm.runtime(), [100], &[1.0f32; 100])?;
        (0..2).try_for_each(|_| summed(&comm, &x).map(drop))?;
        comm.runtime().capture(|| summed(&comm, &x)).map(drop)
    };
    let gpu = |_| emulated_gpu::watched(&*FOLDER).map(|(gpu, _)| gpu);
    let outcomes = Ranks::new(1).outcomes(gpu, program).expect("one rank");
    let error = outcomes[0].as_ref().err().map_or("no error".into(), |error| error.to_string());
    assert!(error.contains("all_reduce") && error.contains("over NCCL"), "{error}");
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
        let (gpus, threads) = (on_gpus(n, &nccl(), training), on_threads(n, training));
        for ((losses, weights), (expected, kept)) in gpus.iter().zip(&threads) {
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
            assert!(losses.iter().zip(expected).all(|(a, b)| near(*a, *b)), "{n}: {losses:?}, {expected:?}");
            assert!(weights.iter().zip(kept).all(|(a, b)| near(f64::from(*a), f64::from(*b))), "{n}");
        }
        assert!(gpus.iter().all(|rank| rank.1 == gpus[0].1), "{n}: ranks have equal weights");
    }
}
