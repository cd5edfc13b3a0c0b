//! The kernels of subgroups and those of workgroup memory give the same bits.

use std::sync::Arc;

use numcore::{
    DType, Error, MemoryCategory, Result, Tensor,
    ops::{Matmul, MatmulOps, ViewOps},
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

#[test]
fn products_by_subgroups_have_the_same_bits() -> Result<()> {
    let (with, without) = (device(false)?, device(true)?);
    let (with, without) = (&with, &without);
    if with.queue.device.lanes().is_none() {
        return Ok(());
    }
    let sizes = [[2, 37, 19, 40], [3, 3, 8, 1], [1, 1, 17, 9]];
    for (dtype, sizes) in [(DType::F32, &sizes[..]), (DType::BF16, &sizes[..1]), (DType::F16, &sizes[1..2])] {
        for &sizes in sizes {
            let (a, b) = (products(with, dtype, sizes)?, products(without, dtype, sizes)?);
            for (i, (a, b)) in a.iter().zip(&b).enumerate() {
                assert!(a == b, "product {i} of {sizes:?} in {dtype}");
            }
        }
    }
    Ok(())
}
