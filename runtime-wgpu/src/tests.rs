//! Kernels that exchange values in subgroups give the bits of those that do so in workgroup memory alone.

use std::sync::Arc;

use numcore::{
    DType, Error, MemoryCategory, Result, Tensor,
    fused::{FusedOp, NnOps, SoftmaxGrad},
    ops::{Apply, Matmul, MatmulOps, ViewOps},
};

use crate::{Wgpu, device::WgpuDevice, queue::Queue};

/// A device of its own, without subgroups if `plain`.
fn device(plain: bool) -> Result<Wgpu> {
    let device = WgpuDevice::apart(|device| device.subgroup = if plain { 1 } else { device.subgroup })?;
    Ok(Wgpu { queue: Arc::new(Queue::new(Arc::new(device))), use_: MemoryCategory::Activations })
}

/// The bytes of products of all layouts that differ to a kernel.
fn products(gpu: &Wgpu, dtype: DType, [batch, m, k, n]: [usize; 4]) -> Result<Vec<Vec<u8>>> {
    let numbers = |dims: &[usize], seed: u64| Tensor::normal(gpu, dims, dtype, 0.0, 1.0, seed);
    let (a, b) = (numbers(&[batch, m, k], 1)?, numbers(&[batch, k, n], 2)?);
    let (across, along) = (numbers(&[batch, k, m], 3)?, numbers(&[n, k], 4)?);
    let (bias, residual) = (numbers(&[n], 5)?, numbers(&[batch, m, n], 6)?);
    let shared = b.narrow(0, 0, 1)?.broadcast_to([batch, k, n])?;
    let mut all = vec![
        a.matmul(&b)?,
        across.transpose(1, 2)?.matmul(&shared)?,
        a.flip(&[1, 2])?.matmul(&along.transpose(0, 1)?)?,
        a.linear(&along, Some(&bias))?,
        a.linear_onto(&along, Some(&bias), &residual)?,
    ];
    let mut sum = residual.copy()?.try_mut().map_err(|_| Error::argument("test", "is shared"))?;
    sum.accumulate(&Matmul.into(), &[&a, &b])?;
    all.push(sum.freeze()?);
    all.iter().map(Tensor::to_bytes).collect()
}

/// The bytes of rows that are merged, and of their gradients.
fn rows(gpu: &Wgpu, dtype: DType, width: usize) -> Result<Vec<Vec<u8>>> {
    let numbers = |dims: &[usize], seed: u64| Tensor::normal(gpu, dims, dtype, 0.0, 3.0, seed);
    let (x, g) = (numbers(&[5, width], 1)?, numbers(&[5, width], 2)?);
    let (w, b) = (numbers(&[width], 3)?, numbers(&[width], 4)?);
    let classes = Tensor::from_slice(gpu, [5], &[0i64, 3, width as i64 - 1, 1, 2])?;
    let mut all = vec![x.softmax(-1)?];
    let grad = FusedOp::SoftmaxGrad(SoftmaxGrad { log: false });
    all.extend(Tensor::apply(grad.into(), &[&all[0], &g])?);
    all.push(x.layer_norm(Some(&w), Some(&b), 1e-5)?);
    all.push(x.rms_norm(Some(&w), 1e-5)?);
    all.push(x.cross_entropy(&classes)?);
    all.iter().map(Tensor::to_bytes).collect()
}

/// Calls `of` on a device with subgroups, and on one without, and compares the bytes of the results.
fn same(of: impl Fn(&Wgpu) -> Result<Vec<Vec<u8>>>, what: &str) -> Result<()> {
    let (with, without) = (of(&device(false)?)?, of(&device(true)?)?);
    for (i, (with, without)) in with.iter().zip(&without).enumerate() {
        assert!(with == without, "result {i} of {what}");
    }
    Ok(())
}

#[test]
fn products_by_subgroups_have_the_same_bits() -> Result<()> {
    let sizes = [[2, 37, 19, 40], [3, 3, 8, 1], [1, 1, 17, 9]];
    for (dtype, sizes) in [(DType::F32, &sizes[..]), (DType::BF16, &sizes[..1]), (DType::F16, &sizes[1..2])] {
        for &sizes in sizes {
            same(|gpu| products(gpu, dtype, sizes), &format!("{sizes:?} in {dtype}"))?;
        }
    }
    Ok(())
}

#[test]
fn rows_by_subgroups_have_the_same_bits() -> Result<()> {
    for (dtype, width) in [(DType::F32, 5), (DType::F32, 1000), (DType::BF16, 301)] {
        same(|gpu| rows(gpu, dtype, width), &format!("rows of {width} in {dtype}"))?;
    }
    Ok(())
}
