//! Products of few rows with columns that are adjacent in memory: the bits of products of many rows.

use numcore::{
    DType, Tensor,
    ops::{Apply, MatmulOps, PointwiseOps, ViewOps},
};
use runtime_cpu::{Cpu, Simd};

fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

fn levels() -> impl Iterator<Item = Cpu> {
    let builds = |simd| [1, 3].map(|threads| Cpu::builder().threads(threads).simd(simd).build());
    // With AMX, products of many rows have bits of their own.
    Simd::ALL.into_iter().filter(|simd| simd.is_available() && *simd < Simd::Amx).flat_map(builds)
}

/// Row `i` of a product of some rows has the bits it has in a product of all of them, at every level.
#[test]
fn a_row_has_the_bits_it_has_among_others() {
    for (k, n) in [(1, 16), (7, 17), (64, 48), (100, 129), (513, 40), (1300, 65), (768, 300), (0, 32)] {
        for dtype in [DType::F32, DType::F64] {
            let mut first: Option<Vec<u8>> = None;
            for cpu in levels() {
                let tensor = |shape: [usize; 2], seed| {
                    let values = numbers(shape[0] * shape[1], seed);
                    Tensor::from_slice(&cpu, shape, &values).unwrap().to_dtype(dtype).unwrap()
                };
                let (x, w) = (tensor([12, k], 1), tensor([n, k], 2));
                let (bias, residual) = (tensor([1, n], 3).reshape([n]).unwrap(), tensor([12, n], 4));
                let whole = x.linear_onto(&w, Some(&bias), &residual).unwrap();
                for rows in 1..=5 {
                    let part = x.narrow(0, 3, rows).unwrap();
                    let got = part.linear_onto(&w, Some(&bias), &residual.narrow(0, 3, rows).unwrap()).unwrap();
                    let due = whole.narrow(0, 3, rows).unwrap().contiguous().unwrap();
                    assert_eq!(got.to_bytes().unwrap(), due.to_bytes().unwrap(), "{rows} rows, k {k}, n {n}, {dtype}");
                }
                let bytes = x.narrow(0, 0, 1).unwrap().linear(&w, None).unwrap().to_bytes().unwrap();
                assert_eq!(*first.get_or_insert(bytes.clone()), bytes, "k {k}, n {n}, {dtype}");
            }
        }
    }
}

/// Rows of the input that are not contiguous, weights with room between their rows, and accumulation.
#[test]
fn strides_and_accumulation() {
    let cpu = Cpu::with_threads(2);
    let (k, n) = (70, 50);
    let wide = Tensor::from_slice(&cpu, [n, k + 9], &numbers(n * (k + 9), 5)).unwrap();
    let w = wide.narrow(1, 4, k).unwrap();
    let columns = Tensor::from_slice(&cpu, [k, 2], &numbers(2 * k, 6)).unwrap();
    for x in [columns.t().unwrap(), columns.t().unwrap().contiguous().unwrap()] {
        let got = x.linear(&w, None).unwrap();
        let due = x.contiguous().unwrap().linear(&w.contiguous().unwrap(), None).unwrap();
        assert_eq!(got.to_bytes().unwrap(), due.to_bytes().unwrap());
    }
    let x = columns.t().unwrap().contiguous().unwrap();
    let product = x.linear(&w, None).unwrap();
    let mut sum =
        product.clone().contiguous().unwrap().mul(1.0).unwrap().try_mut().unwrap_or_else(|_| panic!("shared"));
    let op = numcore::ops::Op::from(numcore::ops::Matmul);
    sum.accumulate(&op, &[&x, &w.t().unwrap()]).unwrap();
    let sum = sum.freeze().unwrap();
    assert_eq!(sum.to_bytes().unwrap(), product.add(&product).unwrap().to_bytes().unwrap());
    assert_eq!(sum.spec().shape.dims(), [2, n]);
}
