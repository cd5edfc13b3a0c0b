//! Every level of this processor against sums in `f64`.

use half::bf16;

use super::*;
use crate::matmul::Matrix;

/// A matrix in memory of its own, and where in it what is.
struct Known {
    memory: Vec<bf16>,
    start: usize,
    strides: [isize; 2],
}

impl Known {
    /// Row-major, column-major, every second number of rows with a gap, rows backwards.
    fn all([rows, columns]: [usize; 2], seed: u64) -> [Known; 4] {
        let (r, c) = (rows as isize, columns as isize);
        let layouts = [(0, [c, 1]), (0, [1, r]), (1, [2 * c + 3, 2]), ((r - 1) * (c + 5), [-(c + 5), 1])];
        layouts.map(|(start, strides)| {
            let len = 4 * (rows + 1) * (columns + 5);
            let mut x = seed | 1;
            let mut next = || {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                bf16::from_f32((x >> 40) as f32 / (1 << 23) as f32 - 1.0)
            };
            Known { memory: (0..len).map(|_| next()).collect(), start: start as usize, strides }
        })
    }

    fn get(&self, i: usize, j: usize) -> f64 {
        let at = self.start as isize + i as isize * self.strides[0] + j as isize * self.strides[1];
        self.memory[at as usize].to_f64()
    }

    fn matrix(&self) -> Matrix<*const u16> {
        let [row, column] = self.strides;
        Matrix { at: self.memory[self.start..].as_ptr().cast(), row, column }
    }
}

fn levels() -> impl Iterator<Item = Level> {
    let (there, missing): (Vec<_>, Vec<_>) = Level::ALL.into_iter().partition(|l| l.is_available());
    if !missing.is_empty() {
        eprintln!("not tested, this processor lacks it: {missing:?}");
    }
    there.into_iter()
}

/// `out = a · b (+ out)` in columns `step` apart.
fn product(level: Level, sizes: [usize; 3], a: &Known, b: &Known, out: &mut Known, add: bool) {
    let [row, column] = out.strides;
    let at = out.memory[out.start..].as_mut_ptr().cast();
    // SAFETY: the matrices lie in memory of their own, of these sizes.
    unsafe { block::product(level, sizes, Matrix { at, row, column }, a.matrix(), b.matrix(), Epilogue::adding(add)) }
}

fn check(level: Level, [m, k, n]: [usize; 3], a: &Known, b: &Known, out: &mut Known, add: bool) {
    let mut expected = vec![(0.0, 0.0); m * n];
    for (at, e) in expected.iter_mut().enumerate() {
        let products = (0..k).map(|q| a.get(at / n, q) * b.get(q, at % n));
        let old = if add { out.get(at / n, at % n) } else { 0.0 };
        *e = (products.clone().sum::<f64>() + old, products.map(f64::abs).sum());
    }
    product(level, [m, k, n], a, b, out, add);
    for (at, (e, size)) in expected.into_iter().enumerate() {
        let got = out.get(at / n, at % n);
        let room = e.abs() / 256.0 + size * k as f64 * f64::from(f32::EPSILON);
        assert!((got - e).abs() <= room, "{level:?} [{m}, {k}, {n}] at {at}: {got} for {e}");
    }
}

#[test]
fn sizes_and_strides() {
    let sizes = [1, 15, 16, 17, 31, 32, 33, 70];
    let sizes = sizes.map(|m| sizes.map(|n| [1, 2, 15, 32, 33, 64, 97].map(|k| [m, k, n])));
    for level in levels() {
        for [m, k, n] in sizes.iter().flatten().flatten().copied() {
            for a in &Known::all([m, k], 1) {
                for b in &Known::all([k, n], 2) {
                    check(level, [m, k, n], a, b, &mut Known::all([m, n], 3)[(m + k + n) % 4], k % 2 == 0);
                }
            }
        }
    }
}

/// Rows in place and rows that lie too badly in the first cache for that, forwards and backwards.
#[test]
fn rows_far_apart() {
    for level in levels() {
        for sizes @ [m, k, n] in [[64, 64, 40], [70, 704, 33], [33, 1312, 65]] {
            for apart in [2048, 2049, 4096, -2048, -2080] {
                let [mut a, ..] = Known::all([m, 2200], 14);
                let start = if apart < 0 { (m as isize - 1) * -apart } else { 0 };
                a.start = start as usize;
                a.strides = [apart, 1];
                let [b, ..] = Known::all([k, n], 15);
                check(level, sizes, &a, &b, &mut Known::all([m, n], 16)[0], apart < 0);
            }
        }
    }
}

/// Sums that are put aside, and more columns than are packed at once.
#[test]
fn long_sums_and_many_columns() {
    for level in levels() {
        for (sizes, cuts) in
            [([40, 9000, 70], 3), ([40, 8224, 70], 3), ([3, 513, 2200], 3), ([33, 4097, 33], 3), ([2100, 520, 20], 3)]
        {
            let [m, k, n] = sizes;
            let (a, b) = (Known::all([m, k], 4), Known::all([k, n], 5));
            for i in 0..cuts {
                check(level, sizes, &a[i], &b[(i + 1) % 3], &mut Known::all([m, n], 6)[i], i == 1);
            }
        }
    }
}

/// Where a tile of the output begins does not change its bits.
#[test]
fn cuts_do_not_show() {
    let [m, k, n] = [70, 700, 90];
    for level in levels() {
        for (a, b) in Known::all([m, k], 7).iter().zip(&Known::all([k, n], 8)) {
            let [mut whole, mut turned, ..] = Known::all([m, n], 9);
            product(level, [m, k, n], a, b, &mut whole, false);
            product(level, [m, k, n], a, b, &mut turned, false);
            for i in (0..m).step_by(13) {
                for j in (0..n).step_by(37) {
                    let mut one = Known { memory: vec![bf16::ZERO], start: 0, strides: [1, 1] };
                    let (row, column) = (a.matrix().part(i, 0), b.matrix().part(0, j));
                    let out = Matrix { at: one.memory.as_mut_ptr().cast(), row: 1, column: 1 };
                    // SAFETY: one number, and a row and a column of the operands.
                    unsafe { block::product(level, [1, k, 1], out, row, column, Epilogue::adding(false)) };
                    assert_eq!([whole.get(i, j), turned.get(i, j)], [one.get(0, 0); 2], "{level:?} at {i}, {j}");
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays() {
    let sizes @ [m, k, n] = [20, 40, 20];
    for level in levels() {
        let ([mut a, ..], [b, ..]) = (Known::all([m, k], 10), Known::all([k, n], 11));
        for (i, x) in [f32::NAN, f32::INFINITY, f32::MAX].into_iter().enumerate() {
            a.memory[i * k + 7] = bf16::from_f32(x);
        }
        let [mut out, ..] = Known::all([m, n], 12);
        product(level, sizes, &a, &b, &mut out, false);
        for j in 0..n {
            assert!(out.get(0, j).is_nan() && out.get(1, j).is_infinite() && !out.get(3, j).is_nan());
            assert!(out.get(2, j).abs() > 1e30 || b.get(7, j) == 0.0);
        }
    }
}

#[test]
fn sums_of_nothing() {
    for level in levels() {
        let [mut out, ..] = Known::all([40, 40], 13);
        let ([a, ..], [b, ..]) = (Known::all([40, 0], 1), Known::all([0, 40], 1));
        product(level, [40, 0, 40], &a, &b, &mut out, false);
        assert!((0..1600).all(|i| out.get(i / 40, i % 40) == 0.0));
    }
}
