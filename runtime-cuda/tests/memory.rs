//! The pools of queues over a driver whose memory is limited: what is given back when it runs short, by whom, and what a captured step gets.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use autograd::{Leaf, Var, backward};
use emulated_gpu::AccessOrder;
use numcore::{
    DType, ErrorKind, MemoryCategory, Result, Runtime, Tensor,
    fused::NnOps,
    ops::{MatmulOps, PointwiseOps, ReduceOps},
};
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

const MIB: usize = 1 << 20;

fn zeros(rt: &Cuda, mib: usize) -> Result<Tensor<Cuda>> {
    Tensor::zeros(rt, [mib * MIB / 4], DType::F32)
}

fn watched() -> Result<(Cuda, AccessOrder)> {
    emulated_gpu::watched(&*FOLDER)
}

/// Freed blocks become one, which serves a request as large as all of them.
#[test]
fn freed_neighbours_are_one_block() -> Result<()> {
    let (cuda, memory) = emulated_gpu::unexecuted(1 << 30)?;
    drop(zeros(&cuda, 100)?);
    let allocations = memory.allocations();
    for sizes in [[60, 40], [10, 90], [33, 67]] {
        let parts: Vec<_> = sizes.iter().map(|mib| zeros(&cuda, *mib)).collect::<Result<_>>()?;
        drop(parts);
    }
    drop(zeros(&cuda, 100)?);
    assert_eq!((memory.allocations(), cuda.memory().reserved), (allocations, 100 * MIB));
    Ok(())
}

/// Less memory than the segments of a pool that grows freely: the own queue gives back what is free of it.
#[test]
fn the_own_queue_gives_back_first() -> Result<()> {
    let (cuda, memory) = emulated_gpu::unexecuted(100 * MIB)?;
    let kept = zeros(&cuda, 30)?;
    drop([zeros(&cuda, 30)?, zeros(&cuda, 20)?]);
    assert!(memory.used() > 80 * MIB);
    let larger = zeros(&cuda, 60)?;
    assert!(memory.used() < 100 * MIB);
    drop((kept, larger));
    cuda.trim();
    assert_eq!(cuda.memory().reserved, 0);
    Ok(())
}

/// A queue that keeps much for reuse gives it back when another one needs it, and only then; what it still uses stays.
#[test]
fn other_queues_trim_for_one_in_need() -> Result<()> {
    let (cuda, memory) = emulated_gpu::unexecuted(128 * MIB)?;
    let (other, third) = (cuda.fork()?, cuda.fork()?);
    let used = zeros(&other, 22)?;
    drop([zeros(&other, 30)?, zeros(&other, 24)?]);
    drop(zeros(&third, 2)?);
    zeros(&cuda, 18).map(drop)?;
    assert_eq!((other.memory().reserved, third.memory().reserved > 0), (76 * MIB, true), "enough was free");
    let large = zeros(&cuda, 90)?;
    assert_eq!((other.memory().reserved, third.memory().reserved), (22 * MIB, 0));
    let error = zeros(&other, 20).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::OutOfMemory { .. }), "{error}");
    drop(large);
    assert!(memory.used() > 110 * MIB, "kept by the first queue");
    drop(zeros(&other, 20)?);
    drop(used);
    Ok(())
}

/// What other queues keep is given back once their work has passed, on memory that the watcher sees being reused.
#[test]
fn memory_changes_queues_in_order() -> Result<()> {
    let (cuda, order) = watched()?;
    let other = cuda.fork()?;
    order.memory().limit(order.memory().used() + 44 * MIB);
    for round in 0..4 {
        let (first, second) = if round % 2 == 0 { (&cuda, &other) } else { (&other, &cuda) };
        let x = Tensor::full(first, [6 * MIB / 4], DType::F32, f64::from(round))?;
        let y = x.add(&x)?.mul(&x)?;
        // The other queue reads what this one computed, and it is dropped there and here.
        second.wait(&first.record()?)?;
        let z = Tensor::zeros(second, y.shape(), y.dtype())?.add(&y)?;
        drop((x, y));
        let want = (2 * round * round) as f32;
        assert!(z.to_vec::<f32>()?.iter().all(|found| *found == want), "round {round}");
    }
    drop((cuda, other));
    let complaints = order.complaints();
    assert!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

/// A captured step takes, splits and merges blocks as the step that ran before it did: the driver is asked for nothing, and its blocks stay with
/// the graph.
#[test]
fn a_captured_step_uses_what_the_step_before_it_used() -> Result<()> {
    let (cuda, order) = watched()?;
    let ones = |mib: usize| Tensor::ones(&cuda, [mib * MIB / 4], DType::F32);
    // The second sum takes the memory of what the first one left, which was two blocks.
    let step = || -> Result<Tensor<Cuda>> {
        let first = ones(4)?.add(&ones(4)?)?.sum_all()?;
        let second = ones(7)?.add(&ones(7)?)?.sum_all()?;
        first.add(&second)
    };
    let want = step()?.item()?;
    step()?;
    let allocations = order.memory().allocations();
    let (graph, y) = cuda.capture(step)?;
    // Two: the workspace of products, which was not needed before, and the keys of random bits; neither is a tensor's.
    assert_eq!(order.memory().allocations(), allocations + 2);
    // Everything else gets other memory, which a launch leaves alone.
    let others: Vec<_> = (0..4).map(|_| ones(6)).collect::<Result<_>>()?;
    for _ in 0..2 {
        graph.launch()?;
        assert_eq!(y.item()?, want);
    }
    for x in &others {
        assert_eq!(x.sum_all()?.item()?, (6 * MIB / 4) as f64);
    }
    drop((graph, y, others));
    cuda.trim();
    assert_eq!(cuda.memory().reserved, 0, "everything came back");
    let complaints = order.complaints();
    assert!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

/// A tensor of one captured step that another one drops belongs to both graphs: it returns when the second of them is gone.
#[test]
fn memory_of_two_graphs_returns_after_both() -> Result<()> {
    for first_goes_first in [true, false] {
        let (cuda, _) = emulated_gpu::unexecuted(1 << 30)?;
        let x = zeros(&cuda, 3)?;
        let step = |y: Option<Tensor<Cuda>>| y.as_ref().unwrap_or(&x).add(&x);
        drop((step(None)?, step(None)?));
        let (first, y) = cuda.capture(|| step(None))?;
        let (second, z) = cuda.capture(|| step(Some(y)))?;
        drop((x, z));
        let graphs = if first_goes_first { [first, second] } else { [second, first] };
        let mut reserved = Vec::new();
        for graph in graphs {
            drop(graph);
            // The rest of the segment is free, so a block that came back would be merged with it.
            cuda.trim();
            reserved.push(cuda.memory().reserved > 0);
        }
        assert_eq!(reserved, [true, false], "first: {first_goes_first}");
    }
    Ok(())
}

/// A tensor of before that a captured step reads and drops: its memory stays with the graph.
#[test]
fn memory_that_a_captured_step_drops_stays_with_the_graph() -> Result<()> {
    let (cuda, _) = watched()?;
    let filled = |value: f64| Tensor::full(&cuda, [3 * MIB / 4], DType::F32, value);
    let x = filled(1.0)?;
    let step = |batch: Tensor<Cuda>| x.add(&batch)?.mul(&batch);
    for _ in 0..2 {
        step(filled(2.0)?)?;
    }
    let batch = filled(3.0)?;
    let (graph, y) = cuda.capture(|| {
        let sum = x.add(&batch)?;
        drop(batch);
        Ok(sum)
    })?;
    let others: Vec<_> = (0..8).map(|_| filled(100.0)).collect::<Result<_>>()?;
    graph.launch()?;
    assert!(y.to_vec::<f32>()?.iter().all(|found| *found == 4.0), "the step reads what it dropped");
    drop(others);
    Ok(())
}

/// An error of memory says what was needed, what the device has, and who holds what.
#[test]
fn an_error_says_who_holds_what() -> Result<()> {
    let (cuda, memory) = emulated_gpu::unexecuted(128 * MIB)?;
    let other = cuda.fork()?;
    let parameters = Tensor::<Cuda>::zeros(&cuda.with_category(MemoryCategory::Parameters), [6 * MIB], DType::F32)?;
    // Two free blocks of this queue, and one of the other, between blocks that are in use.
    let holes = [zeros(&cuda, 8)?, zeros(&cuda, 5)?, zeros(&cuda, 4)?, zeros(&cuda, 3)?];
    let beside = [zeros(&other, 5)?, zeros(&other, 5)?];
    let held = zeros(&other, 30)?;
    let ([first, kept, last, end], [used, free]) = (holes, beside);
    drop((kept, end, free));
    let error = zeros(&cuda, 60).unwrap_err();
    let ErrorKind::OutOfMemory { requested, report, .. } = error.kind() else { panic!("{error}") };
    assert_eq!(*requested, 60 * MIB);
    assert_eq!(report.stats.of(MemoryCategory::Activations).live, 12 * MIB);
    assert_eq!(report.stats.of(MemoryCategory::Parameters).live, 24 * MIB);
    assert_eq!(report.kept, cuda.memory().reserved - cuda.memory().total.live);
    assert_eq!((report.kept, report.largest_kept), (8 * MIB, 5 * MIB));
    let others = report.others.expect("queues know each other");
    let unused = other.memory().reserved - other.memory().total.live;
    assert_eq!((others.count, others.live, others.kept), (1, 35 * MIB, unused));
    assert!(unused >= 5 * MIB, "{unused}");
    let device = report.device.expect("the driver says it");
    assert_eq!((device.capacity, device.free), (128 * MIB, 128 * MIB - memory.used()));
    let text = error.to_string();
    let words = [
        "62914560 bytes asked for",
        "the device has 128.0 MiB",
        "activations 12.0 MiB, parameters 24.0 MiB",
        "1 other queue: 35.0 MiB",
    ];
    assert!(
        words.iter().all(|part| text.contains(part))
            && text.contains("5.0 MiB the largest block")
            && text.contains("ZeRO"),
        "{text}"
    );
    drop((parameters, first, last, held, used));
    Ok(())
}

/// The driver's memory ends at each allocation of a step in turn: the error is one of memory, and the step after it is as
/// if nothing had been.
#[test]
fn any_allocation_may_be_refused() -> Result<()> {
    let step = |rt: &Cuda| -> Result<Vec<f64>> {
        let x = Tensor::uniform(rt, [300, 300], DType::F32, -1.0, 1.0, 1)?;
        let w = Leaf::new("w", Tensor::uniform(rt, [300, 200], DType::F32, -1.0, 1.0, 2)?)?;
        let loss = Var::new(x).matmul(&w.var())?.softmax(-1)?.square()?.sum_all()?;
        backward(&loss)?.of(&w.var()).expect("a gradient").to_f64s()
    };
    let want = step(&watched()?.0)?;
    let mut refused = 0;
    loop {
        let (cuda, order) = watched()?;
        order.memory().refuse_after(refused);
        match step(&cuda) {
            Ok(got) => {
                assert_eq!(got, want);
                break;
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::OutOfMemory { .. }), "allocation {refused}: {error}")
            }
        }
        order.memory().refuse_after(usize::MAX);
        assert_eq!(step(&cuda)?, want, "allocation {refused}");
        assert!(order.complaints().is_empty(), "allocation {refused}");
        refused += 1;
    }
    assert!(refused > 2, "{refused}");
    Ok(())
}
