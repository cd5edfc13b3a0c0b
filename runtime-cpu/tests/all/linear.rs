//! A linear layer in one kernel has the bits of the matmul followed by two sums.

use crate::common::*;
use numcore::{
    DType,
    ops::{MatmulOps, PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;

/// The values of `x` in memory in several ways: dense, transposed, backwards, every second element. And rows that
/// repeat, which have other values.
fn layouts(x: &T) -> Vec<T> {
    let (rank, last) = (x.dims().len() as isize, *x.dims().last().unwrap());
    let back: Vec<isize> = (0..rank).rev().collect();
    let turned = x.permute(&back).unwrap().copy().unwrap().permute(&back).unwrap();
    let backwards = x.flip(&back).unwrap().copy().unwrap().flip(&back).unwrap();
    let spread = x.embed(-1, 2 * last + 1, 1, 2).unwrap().slice(-1, 1, last, 2).unwrap();
    let repeated = x.narrow(0, 0, 1).unwrap().broadcast_to(x.dims()).unwrap();
    vec![x.clone(), turned, backwards, spread, repeated]
}

/// `x: [.., K]`, `w: [O, K]`, bias and residual in several layouts; `f32` and `f64` equal the matmul followed by two
/// sums, to the last bit; half-precision results are rounded once.
#[test]
fn linear_is_the_product_and_the_sums() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS {
        let random = |shape: &[usize], seed| store(&cpu, dtype, shape, &draw(dtype, shape.iter().product(), seed));
        for [m, k, n] in [[1, 3, 1], [6, 5, 7], [36, 700, 1], [4, 600, 50], [70, 33, 100], [130, 513, 20], [6, 0, 5]] {
            let w = &random(&[n, k], 2);
            for x in layouts(&random(&[m, k], 1)) {
                for (b, r) in layouts(&random(&[n], 3)).iter().zip(&layouts(&random(&[m, n], 4))) {
                    let all = x.linear_onto(w, Some(b), r).unwrap();
                    let wide = |t: &T| if dtype.is_half() { t.to_dtype(DType::F32) } else { Ok(t.clone()) };
                    let [x, w, b, r] = [&x, w, b, r].map(|t| wide(t).unwrap());
                    let apart = x.matmul(&w.t().unwrap()).unwrap().add(&b).unwrap().add(&r).unwrap();
                    let unit = if dtype.is_half() { dtype.epsilon() * (k as f64).sqrt().max(1.0) } else { 0.0 };
                    let apart = apart.to_f64s().unwrap();
                    close(&all, &apart, unit, &format!("linear {dtype} [{m}, {k}, {n}]"));
                }
            }
        }
    }
}
