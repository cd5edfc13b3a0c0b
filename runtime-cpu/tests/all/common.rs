//! Helpers shared by the tests: random operands, comparison, and the runtimes that must agree.
#![allow(dead_code)]

use half::{bf16, f16};
use numcore::{DType, Element, Tensor, ops::PointwiseOps, rng::Philox};
use runtime_cpu::{Cpu, Simd};

pub type T = Tensor<Cpu>;

pub const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// A tensor of these values, as the dtype rounds them.
pub fn store(cpu: &Cpu, dtype: DType, shape: &[usize], values: &[f64]) -> T {
    fn of<E: Element>(cpu: &Cpu, shape: &[usize], values: &[f64]) -> T {
        let stored: Vec<E> = values.iter().map(|&x| E::from_f64(x)).collect();
        Tensor::from_slice(cpu, shape, &stored).unwrap()
    }
    match dtype {
        DType::F32 => of::<f32>(cpu, shape, values),
        DType::F64 => of::<f64>(cpu, shape, values),
        DType::F16 => of::<f16>(cpu, shape, values),
        DType::BF16 => of::<bf16>(cpu, shape, values),
        DType::I32 => of::<i32>(cpu, shape, values),
        DType::I64 => of::<i64>(cpu, shape, values),
        DType::U32 => of::<u32>(cpu, shape, values),
        DType::U8 => of::<u8>(cpu, shape, values),
        DType::Bool => of::<bool>(cpu, shape, values),
        DType::F8E4M3 | DType::F8E5M2 => of::<f32>(cpu, shape, values).to_dtype(dtype).unwrap(),
    }
}

/// Random values of a dtype's kind: reals around 0, small integers, `bool`.
pub fn draw(dtype: DType, n: usize, seed: u64) -> Vec<f64> {
    let mut rng = Philox::new(seed, 0);
    let mut next = || rng.normal();
    (0..n)
        .map(|_| match dtype {
            DType::Bool => f64::from(next() > 0.0),
            DType::U8 | DType::U32 => (next().abs() * 20.0).floor(),
            d if d.is_int() => (next() * 20.0).round(),
            _ => next() * 2.0,
        })
        .collect()
}

/// Compares values with expected ones: `tolerance` is relative, and absolute below 1.
pub fn close(got: &T, expected: &[f64], tolerance: f64, what: &str) {
    let got = got.to_f64s().unwrap();
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (&g, &e)) in got.iter().zip(expected).enumerate() {
        let same = g == e || (g.is_nan() && e.is_nan()) || (g - e).abs() <= tolerance * e.abs().max(1.0);
        assert!(same, "{what}: element {i} is {g}, expected {e}");
    }
}

/// Whether two tensors have the same bits.
pub fn same_bits(a: &T, b: &T, what: &str) {
    assert_eq!(a.dims(), b.dims(), "{what}");
    assert!(a.to_bytes().unwrap() == b.to_bytes().unwrap(), "{what}: bits differ");
}

/// Runtimes that must all give the same bits: one to three threads, every instruction set.
pub fn runtimes() -> Vec<Cpu> {
    let threads = [1, 2, 3].map(Cpu::with_threads);
    let levels = Simd::ALL.into_iter().filter(|s| s.is_available()).map(|s| Cpu::builder().threads(2).simd(s).build());
    threads.into_iter().chain(levels).collect()
}
