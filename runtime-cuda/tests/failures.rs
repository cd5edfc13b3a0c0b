//! What fails, and what works after it: failures of one call, of a library, of an index in a captured step, of the
//! device.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock};

use autograd::{Leaf, Var};
use emulated_gpu::{AccessOrder, GemmRefusal};
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

fn watched() -> Result<(Cuda, AccessOrder)> {
    emulated_gpu::watched(&*FOLDER)
}

fn values(rt: &Cuda, dims: &[usize], dtype: DType, seed: u64) -> Result<Tensor<Cuda>> {
    Tensor::uniform(rt, dims, dtype, -1.0, 1.0, seed)
}

#[test]
fn a_refused_product_is_one_error() -> Result<()> {
    let (cuda, order) = watched()?;
    let (a, b) = (values(&cuda, &[3, 5], DType::BF16, 1)?, values(&cuda, &[5, 2], DType::BF16, 2)?);
    let want = a.matmul(&b)?.to_f64s()?;
    order.refuse_gemms(GemmRefusal::Everything);
    for _ in 0..2 {
        let error = a.matmul(&b).unwrap_err().to_string();
        for words in ["matmul", "[3, 5]", "[5, 2]", "bf16", "CUBLAS_STATUS_NOT_SUPPORTED"] {
            assert!(error.contains(words), "{error}");
        }
    }
    // The queue goes on.
    assert_eq!(a.add(&a)?.to_f64s()?, a.mul(2.0)?.to_f64s()?);
    order.refuse_gemms(GemmRefusal::Nothing);
    assert_eq!(a.matmul(&b)?.to_f64s()?, want);
    Ok(())
}

/// Without a workspace, and on aligned copies, products have the bits that they have otherwise: of every layout, summed
/// into memory or not.
#[test]
fn products_that_are_refused_at_first() -> Result<()> {
    let (cuda, order) = watched()?;
    let all = |rt: &Cuda| -> Result<Vec<Vec<f64>>> {
        let mut found = Vec::new();
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let (a, b) = (values(rt, &[2, 3, 5, 7], dtype, 1)?, values(rt, &[3, 7, 3], dtype, 2)?);
            let turned = values(rt, &[3, 3, 7], dtype, 3)?.transpose(1, 2)?;
            found.push(a.matmul(&b)?.to_f64s()?);
            found.push(a.matmul(&turned)?.to_f64s()?);
            found.push(a.flip(&[0])?.matmul(&b.flip(&[0])?)?.to_f64s()?);
            // The second product of a leaf's gradient is added to the first.
            let leaf = Leaf::new("w", values(rt, &[7, 3], dtype, 4)?)?;
            let once = Var::new(a.reshape([30, 7])?).matmul(&leaf.var())?;
            let twice = Var::new(a.mul(0.5)?.reshape([30, 7])?).matmul(&leaf.var())?;
            let gradients = once.add(&twice.mul(&once)?)?.sum_all()?.backward()?;
            gradients.iter().try_for_each(|(_, g)| g.to_f64s().map(|g| found.push(g)))?;
            found.push(a.narrow(3, 1, 3)?.matmul(&b.narrow(1, 2, 3)?.narrow(0, 0, 1)?)?.to_f64s()?);
        }
        Ok(found)
    };
    let want = all(&cuda)?;
    for refusal in [GemmRefusal::Workspace, GemmRefusal::Unaligned] {
        order.refuse_gemms(refusal);
        assert_eq!(all(&cuda)?, want, "{refusal:?}");
    }
    let complaints = order.complaints();
    assert!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

#[test]
fn a_lost_device_says_what_was_launched() -> Result<()> {
    let (cuda, order) = watched()?;
    let x = values(&cuda, &[100, 3], DType::F32, 1)?;
    let sum = x.add(&x)?.sum(&[0])?;
    sum.to_f64s()?;
    order.unplug();
    let first = x.mul(&x).unwrap_err().to_string();
    let told: Vec<&str> = first.lines().skip_while(|l| !l.contains("oldest first")).collect();
    assert!(told.len() > 2 && told.len() <= 17, "{first}");
    assert!(told[1..].iter().all(|line| line.contains(" blocks of ")), "{first}");
    // The launch that failed is the last, and later errors say the same.
    assert!(told.last().is_some_and(|line| line.trim_start().starts_with("mul")), "{first}");
    let later = sum.to_f64s().unwrap_err().to_string();
    assert!(later.starts_with("mul") && later.lines().skip(1).eq(first.lines().skip(1)), "{later}");
    Ok(())
}

/// Every replay reports it, as every step that is not captured does.
#[test]
fn an_index_out_of_range_in_a_replay() -> Result<()> {
    let (cuda, _) = watched()?;
    let x = values(&cuda, &[4, 3], DType::F32, 1)?;
    for (index, right) in [([0i64, 3], true), ([0, 4], false)] {
        let index = Tensor::from_slice(&cuda, [2], &index)?;
        let step = || x.index_select(0, &index);
        for _ in 0..2 {
            assert_eq!(step()?.to_f64s().is_ok(), right);
        }
        let (graph, y) = cuda.capture(step)?;
        cuda.synchronize().expect("nothing has run yet");
        for _ in 0..3 {
            graph.launch()?;
            match cuda.synchronize() {
                Ok(()) => assert!(right),
                Err(error) => assert!(!right && error.to_string().starts_with("gather"), "{error}"),
            }
        }
        cuda.synchronize().expect("it was reported");
        assert_eq!(y.to_f64s()?[..3], x.narrow(0, 0, 1)?.to_f64s()?);
    }
    Ok(())
}

/// Streams run behind the host: a kernel's fault is the error of the first call that waits, and of all after it.
#[test]
fn a_fault_of_a_kernel_is_told_by_a_later_call() -> Result<()> {
    let (cuda, altered) = emulated_gpu::altered(&*FOLDER, "row * step];", "row * step * 100000];")?;
    let index = Tensor::from_slice(&cuda, [2, 3], &[0i64, 1, 2, 3, 2, 1])?;
    let picked = values(&cuda, &[4, 3], DType::F32, 1)?.gather(0, &index)?;
    let sum = picked.sum_all()?;
    assert_eq!(altered(), 1);
    let error = sum.item().unwrap_err().to_string();
    assert!(error.contains("outside of global memory") && error.contains("oldest first"), "{error}");
    for later in [picked.add(&picked).unwrap_err(), cuda.synchronize().unwrap_err()] {
        assert!(later.to_string().contains("outside of global memory"), "{later}");
    }
    Ok(())
}
