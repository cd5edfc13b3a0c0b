//! Devices, errors and memory: properties that the suite cannot test.

use numcore::{
    DType, ErrorKind, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{IndexOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_wgpu::Wgpu;

fn gpu() -> Wgpu {
    Wgpu::new(0).expect("an adapter")
}

#[test]
fn an_adapter_that_is_not_there_says_what_to_install() {
    let error = Wgpu::new(1000).unwrap_err().to_string();
    assert!(error.contains("number 1000") && error.contains("mesa-vulkan-drivers"), "{error}");
    assert!(!Wgpu::adapters().is_empty());
}

#[test]
fn tensors_of_two_handles_meet() -> Result<()> {
    let (a, b) = (gpu(), gpu());
    let x = Tensor::arange(&a, 0.0, 1.0, 5, DType::F32)?;
    let y = Tensor::ones(&b, [5], DType::F32)?;
    b.wait(&b.record()?)?;
    assert_eq!(x.add(&y)?.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0, 5.0]);
    Ok(())
}

#[test]
fn arithmetic_in_f64_is_refused_by_name() -> Result<()> {
    let x = Tensor::from_slice(&gpu(), [2], &[1f64, 2.0])?;
    let error = x.add(&x).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unsupported { op: "add", .. }), "{error}");
    assert!(error.to_string().contains("f64"), "{error}");
    assert_eq!(
        x.index_select(0, &Tensor::from_slice(x.runtime(), [3], &[1i64, 0, 1])?)?.to_vec::<f64>()?,
        [2.0, 1.0, 2.0]
    );
    Ok(())
}

/// A tensor of more than a device can hold, or bind, is an error.
#[test]
fn limits_are_named() -> Result<()> {
    let gpu = gpu();
    let error = TensorMut::alloc(&gpu, Shape::from([1 << 45]), DType::F32).err().expect("an error");
    assert!(matches!(error.kind(), ErrorKind::OutOfMemory { .. }), "{error}");
    let most = gpu.capabilities().max_binding;
    if most >= 1 << 30 {
        return Ok(());
    }
    let large = TensorMut::alloc(&gpu, Shape::from([most / 4 + 64]), DType::F32)?.freeze()?;
    let error = large.sum_all().unwrap_err();
    assert!(error.to_string().contains("max_storage_buffer_binding_size"), "{error}");
    Ok(())
}

/// Elements are counted in 32 bits. Those of a broadcast operand may be more.
#[test]
fn more_elements_than_a_kernel_counts_are_refused() -> Result<()> {
    let one = Tensor::ones(&gpu(), [1, 1], DType::F32)?;
    let error = one.broadcast_to([1 << 17, 1 << 16])?.sum_all().unwrap_err().to_string();
    assert!(error.contains("8589934592 elements") && error.contains("2³²"), "{error}");
    assert_eq!(one.broadcast_to([1 << 9, 1 << 10])?.sum_all()?.item()?, 524_288.0);
    Ok(())
}

/// A buffer larger than a binding is bound by windows around the parts in use.
#[test]
fn parts_of_a_large_buffer_are_used_through_windows() -> Result<()> {
    let gpu = gpu();
    let most = gpu.capabilities().max_binding;
    if most >= 1 << 30 {
        return Ok(());
    }
    let n = most / 4 + 5000;
    let x = Tensor::from_vec(&gpu, (0..n).map(|i| (i % 1000) as f32).collect())?;
    let (start, end) = (x.narrow(0, 3, 1000)?, x.narrow(0, n - 1000, 1000)?);
    assert_eq!(start.sum_all()?.item()?, 499_500.0);
    assert_eq!(end.sum_all()?.item()?, 499_500.0);
    assert_eq!(end.flip(&[0])?.add(1.0)?.to_vec::<f32>()?[0], ((n - 1) % 1000) as f32 + 1.0);
    Ok(())
}

/// An index out of range is found by the next call that waits, which forgets it.
#[test]
fn a_wrong_index_is_reported_once() -> Result<()> {
    let gpu = gpu();
    let x = Tensor::arange(&gpu, 0.0, 1.0, 4, DType::F32)?;
    let at = |i: i64| Tensor::from_slice(&gpu, [1], &[i]);
    let right = x.index_select(0, &at(3)?)?;
    let wrong = x.index_select(0, &at(-1)?)?;
    let error = gpu.synchronize().unwrap_err().to_string();
    assert!(error.contains("gather") && error.contains("0..4"), "{error}");
    gpu.synchronize()?;
    assert_eq!(right.to_vec::<f32>()?, [3.0]);
    drop(wrong);
    Ok(())
}
