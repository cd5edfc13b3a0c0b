//! Products whose algorithm is timed: which is chosen, how often it is asked for, and that trials change no result. On an emulated library whose
//! algorithms take as long as a test says.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock, time::Duration};

use autograd::{Leaf, Var};
use emulated_gpu::{AccessOrder, GemmRefusal};
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

/// Hours: the emulator's own time does not count.
fn hours<const N: usize>(hours: [u64; N]) -> Vec<Duration> {
    hours.map(|h| Duration::from_secs(h * 3600)).to_vec()
}

fn tuned() -> Result<(Cuda, AccessOrder)> {
    let (cuda, order) = emulated_gpu::watched(&*FOLDER)?;
    Ok((cuda.with_tuned_products(true), order))
}

fn values(rt: &Cuda, dims: &[usize], dtype: DType, seed: u64) -> Result<Tensor<Cuda>> {
    Tensor::uniform(rt, dims, dtype, -1.0, 1.0, seed)
}

#[test]
fn the_fastest_is_found_once_for_each_product() -> Result<()> {
    let (cuda, order) = tuned()?;
    order.offer_gemms(hours([3, 1, 2]));
    let (a, b) = (values(&cuda, &[3, 5], DType::F32, 1)?, values(&cuda, &[5, 2], DType::F32, 2)?);
    a.matmul(&b)?;
    let first = order.gemm_candidates();
    assert_eq!(first.asked, 1);
    let trials: Vec<_> = [Some(0), Some(1), Some(2)].repeat(4);
    assert_eq!(first.used, [trials, vec![Some(1)]].concat());
    // Other times change nothing any more.
    order.offer_gemms(hours([1, 2, 3]));
    a.matmul(&b)?;
    a.mul(2.0)?.matmul(&b)?;
    let fork = cuda.fork()?;
    values(&fork, &[3, 5], DType::F32, 1)?.matmul(&values(&fork, &[5, 2], DType::F32, 2)?)?;
    let later = order.gemm_candidates();
    assert_eq!((later.asked, later.used), (0, vec![Some(1); 3]));
    // Another layout is another product.
    a.matmul(&values(&cuda, &[2, 5], DType::F32, 2)?.t()?)?;
    let other = order.gemm_candidates();
    assert_eq!((other.asked, other.used.last()), (1, Some(&Some(0))));
    Ok(())
}

#[test]
fn nothing_is_tuned_unasked() -> Result<()> {
    let (cuda, order) = tuned()?;
    let plain = cuda.clone().with_tuned_products(false);
    order.offer_gemms(hours([3, 1, 2]));
    let (a, b) = (values(&plain, &[3, 5], DType::F32, 1)?, values(&plain, &[5, 2], DType::F32, 2)?);
    a.matmul(&b)?;
    let found = order.gemm_candidates();
    assert_eq!((found.asked, found.used), (0, vec![None]));
    // A choice made by another handle is not taken either.
    let (c, d) = (values(&cuda, &[3, 5], DType::F32, 1)?, values(&cuda, &[5, 2], DType::F32, 2)?);
    c.matmul(&d)?;
    a.matmul(&b)?;
    assert_eq!(order.gemm_candidates().used.last(), Some(&None));
    Ok(())
}

/// Trials write to memory of their own: what is added to, added, or rounded once is as without them.
#[test]
fn trials_change_no_result() -> Result<()> {
    let all = |rt: &Cuda| -> Result<Vec<Vec<f64>>> {
        let mut found = Vec::new();
        for dtype in [DType::F32, DType::BF16] {
            let (x, w) = (values(rt, &[2, 3, 8], dtype, 1)?, values(rt, &[5, 8], dtype, 2)?);
            let (bias, residual) = (values(rt, &[5], dtype, 3)?, values(rt, &[2, 3, 5], dtype, 4)?);
            found.push(x.linear(&w, Some(&bias))?.to_f64s()?);
            found.push(x.linear_onto(&w, Some(&bias), &residual)?.to_f64s()?);
            found.push(x.linear_onto(&w, None, &residual)?.to_f64s()?);
            found.push(residual.to_f64s()?);
            // Batches between which there are gaps.
            let batches = values(rt, &[2, 2, 8, 5], dtype, 5)?.narrow(1, 0, 1)?.squeeze(1)?;
            found.push(x.matmul(&batches)?.to_f64s()?);
            // The second product of a leaf's gradient is added to the first.
            let leaf = Leaf::new("w", values(rt, &[8, 3], dtype, 6)?)?;
            let once = Var::new(x.reshape([6, 8])?).matmul(&leaf.var())?;
            let twice = Var::new(x.mul(0.5)?.reshape([6, 8])?).matmul(&leaf.var())?;
            let gradients = once.add(&twice.mul(&once)?)?.sum_all()?.backward()?;
            gradients.iter().try_for_each(|(_, g)| g.to_f64s().map(|g| found.push(g)))?;
        }
        Ok(found)
    };
    let (cuda, order) = tuned()?;
    let want = all(&cuda.clone().with_tuned_products(false))?;
    order.offer_gemms(hours([2, 3, 1]));
    assert_eq!(all(&cuda)?, want);
    let used = order.gemm_candidates().used;
    assert_eq!(used.last(), Some(&Some(2)));
    assert!(used.iter().all(Option::is_some), "{used:?}");
    assert_eq!(all(&cuda)?, want);
    assert!(order.complaints().is_empty(), "{:?}", order.complaints());
    Ok(())
}

/// In a captured step nothing is timed: what was found before is used, and the library's choice for the rest.
#[test]
fn a_captured_step_takes_what_is_known() -> Result<()> {
    let (cuda, order) = tuned()?;
    order.offer_gemms(hours([3, 2, 1]));
    let (a, b) = (values(&cuda, &[3, 5], DType::F32, 1)?, values(&cuda, &[5, 2], DType::F32, 2)?);
    let plain = cuda.clone().with_tuned_products(false);
    let (c, d) = (values(&plain, &[4, 5], DType::F32, 1)?, values(&plain, &[5, 4], DType::F32, 2)?);
    let want = [a.matmul(&b)?.to_f64s()?, c.matmul(&d)?.to_f64s()?];
    let (c, d) = (values(&cuda, &[4, 5], DType::F32, 1)?, values(&cuda, &[5, 4], DType::F32, 2)?);
    let before = order.gemm_candidates();
    let (graph, (y, z)) = cuda.capture(|| Ok((a.matmul(&b)?, c.matmul(&d)?)))?;
    let in_step = order.gemm_candidates();
    assert_eq!((in_step.asked, &in_step.used[before.used.len()..]), (before.asked, &[Some(2), None][..]));
    graph.launch()?;
    assert_eq!([y.to_f64s()?, z.to_f64s()?], want);
    // It is timed when it is next met outside.
    c.matmul(&d)?;
    assert_eq!(order.gemm_candidates().asked, before.asked + 1);
    Ok(())
}

#[test]
fn what_cannot_be_tried_is_left_out() -> Result<()> {
    let (cuda, order) = tuned()?;
    let product = |n: usize| -> Result<Vec<f64>> {
        values(&cuda, &[n, 5], DType::F32, 1)?.matmul(&values(&cuda, &[5, n], DType::F32, 2)?)?.to_f64s()
    };
    let want = product(3)?;
    // The library has nothing with a workspace: it is asked without.
    order.offer_gemms(hours([2, 1]));
    order.refuse_gemms(GemmRefusal::Workspace);
    assert_eq!(product(4)?.len(), 16);
    order.refuse_gemms(GemmRefusal::Nothing);
    order.offer_gemms(hours([2, 1]));
    product(4)?;
    assert_eq!(order.gemm_candidates().used, [None], "it was found that there is none");
    // One algorithm, or none, is not timed.
    for times in [hours([1]), Vec::new()] {
        order.offer_gemms(times);
        assert_eq!(product(3)?, want);
        let found = order.gemm_candidates();
        assert_eq!(found.used, [None]);
    }
    Ok(())
}

/// Where there is no memory for the result of a trial, the library's choice is kept.
#[test]
fn memory_for_trials_may_be_missing() -> Result<()> {
    let (cuda, order) = tuned()?;
    // More than half a segment.
    let rows = 3 << 20;
    let (a, b) = (Tensor::zeros(&cuda, [rows, 1], DType::F32)?, Tensor::zeros(&cuda, [1, 1], DType::F32)?);
    b.matmul(&b)?;
    cuda.trim();
    order.offer_gemms(hours([2, 1]));
    let memory = order.memory();
    memory.limit(memory.used() + (20 << 20));
    let y = a.matmul(&b)?;
    assert_eq!(order.gemm_candidates().used, [None]);
    memory.limit(usize::MAX);
    assert_eq!(y.shape().numel(), rows);
    Ok(())
}

/// A device that is lost while candidates are timed is an error as at any other time.
#[test]
fn a_lost_device_is_an_error() -> Result<()> {
    let (cuda, order) = tuned()?;
    order.offer_gemms(hours([2, 1]));
    let (a, b) = (values(&cuda, &[3, 5], DType::F32, 1)?, values(&cuda, &[5, 2], DType::F32, 2)?);
    order.unplug();
    let error = a.matmul(&b).unwrap_err().to_string();
    assert!(error.contains("the device is gone"), "{error}");
    Ok(())
}
