//! Streams and events: every access of memory is ordered by them, on the emulator that watches.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use autograd::{Leaf, Var};
use conformance::sections;
use emulated_gpu::AccessOrder;
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ScanOps, SortOps, ViewOps},
};
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

/// Runs `work` on a new handle; returns the unordered accesses.
fn complaints(work: impl Fn(&Cuda) -> Result<()>) -> Vec<String> {
    emulated_gpu::compile_for(&*FOLDER, |listing| drop(work(listing))).unwrap_or_else(|e| panic!("{e}"));
    let (cuda, order): (Cuda, AccessOrder) = emulated_gpu::watched(&*FOLDER).unwrap_or_else(|e| panic!("{e}"));
    work(&cuda).unwrap_or_else(|e| panic!("{e}"));
    assert!(order.operations() > 0);
    // Memory that is freed too early shows at the end.
    drop(cuda);
    order.complaints()
}

fn ordered(work: impl Fn(&Cuda) -> Result<()>) {
    let complaints = complaints(work);
    assert!(complaints.is_empty(), "{} accesses:\n  {}", complaints.len(), complaints.join("\n  "));
}

fn values(rt: &Cuda, n: usize, seed: u64) -> Result<Tensor<Cuda>> {
    Tensor::uniform(rt, [n], DType::F32, -1.0, 1.0, seed)
}

#[test]
fn sections_of_the_suite() {
    for name in ["handle", "values", "errors", "empty tensors", "slots"] {
        ordered(|cuda| {
            let (_, run) = *sections::<Cuda>().iter().find(|(n, _)| *n == name).expect("a section of this name");
            drop(run(cuda));
            Ok(())
        });
    }
}

/// Batches are uploaded while steps are computed, losses are downloaded, and memory is reused.
#[test]
fn training_steps() {
    ordered(|cuda| {
        let mut w = Tensor::uniform(cuda, [300, 40], DType::F32, -0.1, 0.1, 1)?;
        for step in 0..6 {
            // More than a chunk of the staging buffer, and less.
            let batch: Vec<f32> = (0..3000 * 300).map(|i| ((i * 7 + step) % 13) as f32 / 13.0).collect();
            let x = Var::new(Tensor::from_slice(cuda, [3000, 300], &batch)?);
            let y = Var::new(Tensor::from_slice(cuda, [40], &batch[..40])?);
            let leaf = Leaf::new("w", w.clone())?;
            let error = x.matmul(&leaf.var())?.sub(&y)?;
            let loss = error.mul(&error)?.mean_all()?;
            let gradients = loss.backward()?;
            gradients.require(std::slice::from_ref(&leaf))?;
            for (_, g) in gradients.iter() {
                w = w.sub(&g.mul(0.05)?)?;
            }
            assert!(loss.item()?.is_finite());
        }
        Ok(())
    });
}

/// The pattern of communication: a fork works on memory that another queue owns, between two events.
#[test]
fn a_fork_between_events() {
    ordered(|cuda| {
        let other = cuda.fork()?;
        for seed in 0..5 {
            let x = values(cuda, 5000, seed)?;
            other.wait(&cuda.record()?)?;
            let sum = on(&other, &x)?;
            // Dropped while the fork may still read it: its memory goes to the next values, in order.
            drop(x);
            let y = values(cuda, 5000, seed + 9)?;
            cuda.wait(&other.record()?)?;
            y.add(&on(cuda, &sum)?)?.sum_all()?.item()?;
        }
        Ok(())
    });
}

/// `x + x` by the queue of `rt`.
fn on(rt: &Cuda, x: &Tensor<Cuda>) -> Result<Tensor<Cuda>> {
    Tensor::zeros(rt, x.shape(), x.dtype())?.add(x)
}

#[test]
fn long_copies_and_kernels_that_take_memory() {
    ordered(|cuda| {
        let long: Vec<f32> = (0..3_000_000).map(|i| (i % 1000) as f32).collect();
        let x = Tensor::from_slice(cuda, [long.len()], &long)?;
        let mut back = x.add(&x)?;
        if back.to_vec::<f32>()?.iter().zip(&long).any(|(y, x)| *y != 2.0 * x) {
            return Err(numcore::Error::argument("upload", "other values came back"));
        }
        back = back.narrow(0, 0, 20_000)?.reshape([4, 5000])?;
        let (sorted, order) = back.sort(1, true)?;
        let total = sorted.gather(1, &order)?.sum(&[0])?.cumsum(0)?;
        total.to_vec::<f32>()?;
        Ok(())
    });
}

/// A kernel of a collective call may wait for another rank: it is waited for before the driver frees anything.
#[test]
fn memory_is_freed_once_all_queues_are_done() {
    ordered(|cuda| {
        let calls = cuda.fork_for_communication()?;
        let mut moved = Vec::new();
        for _ in 0..2 {
            drop(values(cuda, 1 << 20, 1)?);
            moved.push(values(&calls, 5000, 2)?);
            cuda.trim();
            // The end of a queue frees memory too, and so does that of a captured step.
            moved.push(values(&calls, 5000, 3)?);
            drop(cuda.fork()?);
            let x = values(cuda, 5000, 4)?;
            drop(x.add(&x)?);
            let (graph, y) = cuda.capture(|| x.add(&x))?;
            moved.push(values(&calls, 5000, 5)?);
            drop((graph, y));
        }
        moved.iter().try_for_each(|x| x.to_vec::<f32>().map(drop))
    });
}

/// A watcher that sees nothing would pass all of the above.
#[test]
fn a_fork_without_an_event() {
    let complaints = complaints(|cuda| {
        let other = cuda.fork()?;
        on(&other, &values(cuda, 5000, 1)?)?;
        Ok(())
    });
    assert!(complaints.iter().any(|c| c.contains("(Read, stream") && c.contains("(Write, stream")), "{complaints:?}");
}

#[test]
fn a_device_that_vanishes_is_an_error_from_then_on() -> Result<()> {
    let (cuda, order) = emulated_gpu::watched(&*FOLDER)?;
    let x = values(&cuda, 100, 1)?;
    let y = x.add(&x)?;
    y.to_vec::<f32>()?;
    order.unplug();
    type Call = fn(&Tensor<Cuda>) -> Result<()>;
    let calls: [(&str, Call); 4] = [
        ("add", |x| x.add(x)?.to_vec::<f32>().map(drop)),
        ("download", |x| x.to_vec::<f32>().map(drop)),
        ("upload", |x| values(x.runtime(), 1 << 20, 2).map(drop)),
        ("synchronize", |x| x.runtime().synchronize()),
    ];
    for (name, call) in calls {
        let error = call(&y).expect_err(name).to_string();
        assert!(error.contains("the device is gone") && error.contains("cuda:"), "{name}: {error}");
    }
    Ok(())
}
