//! The runtime's handle: its account of memory, its forks, and its use from several threads.

use numcore::{
    DType, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{MatmulOps, PointwiseOps, ReduceOps},
};

use super::report::{Section, Verdict};

pub(crate) fn handle<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("handle");
    section.check("memory is booked and given back", || booked(rt));
    section.check("memory is booked by use", || by_use(rt));
    section.check("peaks start anew", || peaks(rt));
    section.check("memory kept for reuse goes back", || trimmed(rt));
    section.check("forks have accounts of their own", || forks(rt));
    section.check("forks read each other's memory in order", || across(rt));
    section.check("several threads at once", || threads(rt));
    section.check("an error leaves it usable", || after_an_error(rt));
    section.check("no elements take no memory", || nothing(rt));
    section.check("every use is one of all", || {
        Ok(Verdict::when(rt.memory().by_use.len() == MemoryCategory::ALL.len(), || "uses"))
    });
    section
}

const BYTES: usize = 1 << 20;

fn block<R: Runtime>(rt: &R) -> Result<TensorMut<R>> {
    TensorMut::alloc(rt, Shape::from([BYTES / 4]), DType::F32)
}

fn booked<R: Runtime>(rt: &R) -> Result<Verdict> {
    let before = rt.memory();
    let held = (block(rt)?, block(rt)?);
    let during = rt.memory();
    let grown = during.total.live - before.total.live;
    drop(held);
    let after = rt.memory();
    let right = (2 * BYTES..3 * BYTES).contains(&grown)
        && after.total.live == before.total.live
        && during.total.peak >= during.total.live
        && during.reserved >= during.total.live
        && during.allocations >= before.allocations + 2;
    Ok(Verdict::when(right, || format!("{before:?}, then {during:?}, then {after:?}")))
}

fn by_use<R: Runtime>(rt: &R) -> Result<Verdict> {
    let mut verdict = Verdict::PASSED;
    for use_ in MemoryCategory::ALL {
        let tagged = rt.with_category(use_);
        let before = rt.memory();
        let held = block(&tagged)?;
        let during = rt.memory();
        for other in MemoryCategory::ALL {
            let grown = during.of(other).live - before.of(other).live;
            let right = if other == use_ { grown >= BYTES } else { grown == 0 };
            verdict =
                verdict.and(Verdict::when(right, || format!("{grown} bytes of {use_:?} were booked as {other:?}")));
        }
        drop(held);
    }
    Ok(verdict)
}

fn peaks<R: Runtime>(rt: &R) -> Result<Verdict> {
    drop((block(rt)?, block(rt)?));
    rt.reset_peak();
    let start = rt.memory().total;
    drop(block(rt)?);
    let end = rt.memory().total;
    let grown = end.peak - start.live;
    Ok(Verdict::when(start.peak == start.live && (BYTES..2 * BYTES).contains(&grown), || {
        format!("{start:?}, then {end:?}")
    }))
}

/// Checks trimming: live memory is kept, and queued work reads its original inputs. Memory kept for reuse goes back, at
/// the latest when nothing near it is live.
fn trimmed<R: Runtime>(rt: &R) -> Result<Verdict> {
    let fork = rt.fork()?;
    let x = Tensor::full(&fork, [BYTES / 4], DType::F32, 3.0)?;
    let y = x.mul(&x)?.add(&x)?;
    drop((block(&fork)?, block(&fork)?));
    fork.trim();
    let during = fork.memory();
    let sum = y.sum_all()?.item()?;
    drop((x, y));
    fork.trim();
    let after = fork.memory();
    let right = during.reserved >= during.total.live && after.reserved < BYTES && sum == 12.0 * (BYTES / 4) as f64;
    Ok(Verdict::when(right, || format!("sum {sum}, {during:?}, then {after:?}")))
}

fn forks<R: Runtime>(rt: &R) -> Result<Verdict> {
    let fork = rt.fork()?;
    let (before, own) = (rt.memory(), fork.memory().total.live);
    let held = block(&fork)?;
    let (during, grown) = (rt.memory(), fork.memory().total.live - own);
    drop(held);
    let right = grown >= BYTES && during.total.live == before.total.live && fork.device() == rt.device();
    Ok(Verdict::when(right, || format!("the fork grew by {grown}, its origin from {before:?} to {during:?}")))
}

/// Checks a value that is made on one queue and used on another, after an event.
fn across<R: Runtime>(rt: &R) -> Result<Verdict> {
    let fork = rt.fork()?;
    let x = Tensor::uniform(rt, [300, 300], DType::F32, -1.0, 1.0, 3)?;
    let y = x.matmul(&x)?;
    fork.wait(&rt.record()?)?;
    let there = Tensor::from_bytes(&fork, *y.shape(), y.dtype(), &y.to_bytes()?)?.sum_all()?.to_f64s()?;
    rt.synchronize()?;
    fork.synchronize()?;
    Ok(Verdict::when(there == y.sum_all()?.to_f64s()?, || "another sum"))
}

fn threads<R: Runtime>(rt: &R) -> Result<Verdict> {
    let work = |seed: u64| -> Result<Vec<f64>> {
        let mut x = Tensor::uniform(rt, [64, 64], DType::F32, -0.2, 0.2, seed)?;
        for _ in 0..20 {
            x = x.matmul(&x)?.tanh()?.add(&x.sum_keepdim(&[0])?)?;
        }
        x.to_f64s()
    };
    let alone = (0..4).map(work).collect::<Result<Vec<_>>>()?;
    let together = std::thread::scope(|s| {
        let threads: Vec<_> = (0..4).map(|seed| s.spawn(move || work(seed))).collect();
        let joined = threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Ok(Vec::new())));
        joined.collect::<Result<Vec<_>>>()
    })?;
    let bits = |all: &[Vec<f64>]| all.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
    Ok(Verdict::when(bits(&alone) == bits(&together), || "other results than one after another"))
}

fn after_an_error<R: Runtime>(rt: &R) -> Result<Verdict> {
    use numcore::ops::IndexOps;
    let x = Tensor::arange(rt, 0.0, 1.0, 8, DType::F32)?;
    let wrong = Tensor::from_vec(rt, vec![3i64, 8])?;
    let failed = x.index_select(0, &wrong).and_then(|t| t.to_f64s());
    let sum = x.sum_all()?.item()?;
    Ok(Verdict::when(failed.is_err() && sum == 28.0, || format!("{failed:?}, then {sum}")))
}

fn nothing<R: Runtime>(rt: &R) -> Result<Verdict> {
    let before = rt.memory().total.live;
    let held = Tensor::zeros(rt, [0, 1 << 20], DType::F32)?;
    let grown = rt.memory().total.live - before;
    drop(held);
    Ok(Verdict::when(grown <= 4096, || format!("{grown} bytes")))
}
