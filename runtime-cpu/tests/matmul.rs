//! Matrix products against host loops: sizes around the kernels' edges, every layout, batches, half precision,
//! accumulation.

mod common;

use common::*;
use numcore::{
    DType, Tensor, TensorMut,
    ops::{Matmul, MatmulOps, Op, PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;

/// `[B, M, K] · [B, K, N]` in `f64`, and the same of magnitudes, which bounds the rounding.
fn naive(a: &[f64], b: &[f64], [batch, m, k, n]: [usize; 4]) -> (Vec<f64>, f64) {
    let (mut out, mut size) = (vec![0.0; batch * m * n], 1.0f64);
    for (at, o) in out.iter_mut().enumerate() {
        let (c, i, j) = (at / (m * n), at / n % m, at % n);
        let products = (0..k).map(|q| a[(c * m + i) * k + q] * b[(c * k + q) * n + j]);
        size = size.max(products.clone().map(f64::abs).sum());
        *o = products.sum();
    }
    (out, size)
}

fn check(a: &Known, b: &Known, sizes: [usize; 4]) {
    let dtype = a.tensor.dtype();
    let (expected, size) = naive(&a.values, &b.values, sizes);
    let unit = if dtype.is_half() { dtype.epsilon() } else { 4.0 * dtype.epsilon() };
    close(&a.tensor.matmul(&b.tensor).unwrap(), &expected, unit * size, &format!("{} · {}", a.what, b.what));
}

#[test]
fn sizes_around_the_edges() {
    let cpu = Cpu::with_threads(2);
    let sizes = [1, 2, 3, 7, 8, 16, 17, 48, 49, 100];
    for m in sizes {
        for n in sizes {
            for k in [1, 2, 5, 64, 97] {
                let (a, b) = (&views(&cpu, DType::F32, &[m, k], 1)[0], &views(&cpu, DType::F32, &[k, n], 2)[0]);
                check(a, b, [1, m, k, n]);
            }
        }
    }
}

#[test]
fn every_layout_and_type() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS {
        for [m, k, n] in [[33, 40, 29], [1, 40, 30], [30, 40, 1], [5, 1, 6], [70, 130, 60]] {
            for a in views(&cpu, dtype, &[m, k], 3) {
                for b in views(&cpu, dtype, &[k, n], 4) {
                    check(&a, &b, [1, m, k, n]);
                }
            }
        }
    }
}

#[test]
fn batches_and_broadcast_batches() {
    let cpu = Cpu::with_threads(2);
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for [batch, m, k, n] in [[7, 5, 6, 4], [3, 33, 17, 20], [40, 16, 16, 16]] {
            for a in views(&cpu, dtype, &[batch, m, k], 5) {
                let b = &views(&cpu, dtype, &[batch, k, n], 6)[1];
                check(&a, b, [batch, m, k, n]);
            }
            let (a, b) = (&views(&cpu, dtype, &[batch, m, k], 7)[0], &views(&cpu, dtype, &[1, k, n], 8)[0]);
            let spread = Known { values: b.values.repeat(batch), ..b.clone() };
            check(a, &spread, [batch, m, k, n]);
        }
    }
}

#[test]
fn large_products_are_tiled() {
    let cpu = Cpu::with_threads(2);
    for [m, k, n] in [[300, 257, 500], [1, 3000, 700], [700, 3000, 1], [1000, 3, 1000]] {
        let (a, b) = (&views(&cpu, DType::F32, &[m, k], 9)[0], &views(&cpu, DType::F32, &[k, n], 10)[1]);
        check(a, b, [1, m, k, n]);
    }
}

#[test]
fn products_may_be_added_and_written_through_views() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS {
        let (a, b) = (&views(&cpu, dtype, &[60, 70], 11)[0], &views(&cpu, dtype, &[70, 50], 12)[1]);
        let (expected, size) = naive(&a.values, &b.values, [1, 60, 70, 50]);
        let twice: Vec<f64> = expected.iter().map(|x| 2.0 * x).collect();
        let unit = 4.0 * dtype.epsilon() * size;
        let mut out = TensorMut::alloc(&cpu, [60, 50].into(), dtype).unwrap();
        let mut turned = TensorMut::alloc(&cpu, [50, 60].into(), dtype).unwrap();
        let turn = [numcore::ops::ViewOp::Permute([1, 0].as_slice().into())];
        for _ in 0..2 {
            out.accumulate(&Op::Matmul(Matmul), &[&a.tensor, &b.tensor]).unwrap();
            turned.accumulate_view(&turn, &Op::Matmul(Matmul), &[&a.tensor, &b.tensor]).unwrap();
        }
        close(&out.freeze().unwrap(), &twice, unit, "added");
        close(&turned.freeze().unwrap().t().unwrap(), &twice, unit, "added through a view");
    }
}

#[test]
fn sizes_of_zero() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS {
        for [m, k, n] in [[0, 3, 4], [3, 0, 4], [3, 4, 0], [0, 0, 0]] {
            let a = Tensor::ones(&cpu, [m, k], dtype).unwrap();
            let b = Tensor::ones(&cpu, [k, n], dtype).unwrap();
            close(&a.matmul(&b).unwrap(), &vec![0.0; m * n], 0.0, "empty");
            let mut out = TensorMut::zeros(&cpu, [m, n].into(), dtype).unwrap();
            let one = Tensor::ones(&cpu, [m, n], dtype).unwrap();
            out.accumulate(&Op::identity(), &[&one]).unwrap();
            out.accumulate(&Op::Matmul(Matmul), &[&a, &b]).unwrap();
            close(&out.freeze().unwrap(), &vec![1.0; m * n], 0.0, "added nothing");
        }
    }
}

/// `x: [.., K]`, `w: [O, K]`, bias and residual in every layout; `f32` and `f64` equal the matmul followed by two sums,
/// to the last bit; half-precision results are rounded once.
#[test]
fn linear_is_the_product_and_the_sums() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS {
        for [m, k, n] in [[1, 3, 1], [6, 5, 7], [36, 700, 1], [4, 600, 50], [70, 33, 100], [130, 513, 20], [6, 0, 5]] {
            let w = &views(&cpu, dtype, &[n, k], 2)[0];
            for x in views(&cpu, dtype, &[m, k], 1) {
                for (bias, r) in views(&cpu, dtype, &[n], 3).iter().zip(&views(&cpu, dtype, &[m, n], 4)) {
                    let (b, r) = (&bias.tensor, &r.tensor);
                    let all = x.tensor.linear_onto(&w.tensor, Some(b), r).unwrap();
                    let wide = |t: &Tensor<Cpu>| if dtype.is_half() { t.to_dtype(DType::F32) } else { Ok(t.clone()) };
                    let [x, w, b, r] = [&x.tensor, &w.tensor, b, r].map(|t| wide(t).unwrap());
                    let apart = x.matmul(&w.t().unwrap()).unwrap().add(&b).unwrap().add(&r).unwrap();
                    let unit = if dtype.is_half() { dtype.epsilon() * (k as f64).sqrt().max(1.0) } else { 0.0 };
                    let apart = apart.to_f64s().unwrap();
                    close(&all, &apart, unit, &format!("linear {dtype} [{m}, {k}, {n}]"));
                }
            }
        }
    }
}
