//! Captured steps beside other queues: memory of theirs, events, panics.
#![cfg(feature = "emulate")]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::LazyLock,
};

use numcore::{DType, Result, Runtime, Tensor, ops::PointwiseOps};
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

fn watched() -> Result<Cuda> {
    Cuda::watched(&*FOLDER).map(|(cuda, _)| cuda)
}

fn filled(rt: &Cuda, value: f32) -> Result<Tensor<Cuda>> {
    Tensor::from_slice(rt, [5000], &[value; 5000])
}

/// A batch of a loader's queue that the step drops stays with the graph, and later batches get other memory.
#[test]
fn memory_of_another_queue_is_dropped_in_a_step() -> Result<()> {
    let cuda = watched()?;
    let loader = cuda.fork()?;
    let x = filled(&cuda, 1.0)?;
    let step = |batch: Tensor<Cuda>| x.add(&batch)?.mul(&batch);
    for _ in 0..2 {
        let batch = filled(&loader, 2.0)?;
        cuda.wait(&loader.record()?)?;
        assert_eq!(step(batch)?.to_vec::<f32>()?[4999], 6.0);
    }
    let batch = filled(&loader, 3.0)?;
    cuda.wait(&loader.record()?)?;
    let (graph, y) = cuda.capture(|| step(batch))?;
    let later: Vec<Tensor<Cuda>> = (0..4).map(|_| filled(&loader, 100.0)).collect::<Result<_>>()?;
    cuda.wait(&loader.record()?)?;
    graph.launch()?;
    assert_eq!(y.to_vec::<f32>()?, [12.0; 5000]);
    let reserved = loader.memory().reserved;
    drop((graph, y, later));
    // The block is back: no new one is needed for five tensors.
    let again: Vec<Tensor<Cuda>> = (0..5).map(|_| filled(&loader, 1.0)).collect::<Result<_>>()?;
    assert_eq!(loader.memory().reserved, reserved);
    drop(again);
    Ok(())
}

#[test]
fn a_step_and_another_queue_do_not_wait_for_each_other() -> Result<()> {
    let cuda = watched()?;
    let other = cuda.fork()?;
    let x = filled(&cuda, 1.0)?;
    x.add(&x)?.add(&x)?;
    let outside = other.record()?;
    let (mut inside, mut own) = (None, None);
    let (graph, y) = cuda.capture(|| {
        let y = x.add(&x)?;
        let error = cuda.wait(&outside).unwrap_err().to_string();
        assert!(error.contains("wait") && error.contains("a captured step cannot wait for other queues"), "{error}");
        let event = cuda.record()?;
        cuda.wait(&event)?;
        let error = other.wait(&event).unwrap_err().to_string();
        assert!(error.contains("nothing outside of it can wait for"), "{error}");
        inside = Some(event);
        own = Some(());
        y.add(&x)
    })?;
    // Nor later: what was recorded is a point of the step, not of the queue.
    assert!(inside.is_some_and(|event| cuda.wait(&event).is_err()) && own.is_some());
    graph.launch()?;
    assert_eq!(y.to_vec::<f32>()?, [3.0; 5000]);
    Ok(())
}

#[test]
fn a_panic_in_a_step_ends_its_capture() -> Result<()> {
    let cuda = watched()?;
    let x = filled(&cuda, 1.0)?;
    x.add(&x)?;
    let step = || cuda.capture(|| -> Result<Tensor<Cuda>> { panic!("on purpose, after {:?}", x.add(&x)?.dtype()) });
    assert!(catch_unwind(AssertUnwindSafe(step)).is_err());
    assert_eq!(x.to_dtype(DType::F64)?.to_vec::<f64>()?[0], 1.0, "the queue goes on");
    let (graph, y) = cuda.capture(|| x.add(&x))?;
    graph.launch()?;
    assert_eq!(y.to_vec::<f32>()?[0], 2.0);
    Ok(())
}
