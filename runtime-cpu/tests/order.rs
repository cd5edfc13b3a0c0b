//! Recurrences, order and extremes along an axis, against host loops over lines.

mod common;

use common::*;
use numcore::{
    DType, Tensor,
    ops::{ReduceOps, ScanOps, SortOps, ViewOps},
};
use runtime_cpu::Cpu;

const SHAPES: [&[usize]; 6] = [&[1], &[700], &[5, 300], &[300, 70], &[3, 4, 90], &[2, 0, 3]];

/// Applies `f` to every line of values along an axis.
fn lines(shape: &[usize], axis: usize, values: &[f64], f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let after: usize = shape[axis + 1..].iter().product();
    let before: usize = shape[..axis].iter().product();
    let size = shape[axis];
    let mut parts = vec![vec![]; before * after];
    for (n, part) in parts.iter_mut().enumerate() {
        let first = n / after * size * after + n % after;
        *part = f(&(0..size).map(|i| values[first + i * after]).collect::<Vec<_>>());
    }
    let long = parts.first().map_or(0, Vec::len);
    let at = |i: usize| parts[i / (long * after) * after + i % after][i / after % long];
    (0..before * long * after).map(at).collect()
}

fn running(x: &[f64], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    let mut acc = None;
    x.iter().map(|&x| *acc.insert(acc.map_or(x, |a| f(a, x)))).collect()
}

#[test]
fn running_sums_and_products() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS.into_iter().chain([DType::I64]) {
        for shape in SHAPES {
            for axis in 0..shape.len() {
                for x in views(&cpu, dtype, shape, 1) {
                    let what = format!("axis {axis} of {}", x.what);
                    let sums = lines(shape, axis, &x.values, |l| running(l, |a, b| a + b));
                    let size = sums.iter().fold(30.0, |a: f64, b| a.max(b.abs()));
                    let exact = dtype == DType::I64;
                    let tolerance = if exact { 0.0 } else { 2.0 * tolerance(dtype) * size };
                    close(&x.tensor.cumsum(axis as isize).unwrap(), &sums, tolerance, &what);
                }
            }
        }
    }
    let (x, values) =
        store(&cpu, DType::F32, &[40, 9], &(0..360).map(|i| 1.0 + f64::from(i % 5 - 2) * 0.1).collect::<Vec<_>>());
    close(&x.cumprod(0).unwrap(), &lines(&[40, 9], 0, &values, |l| running(l, |a, b| a * b)), 1e-5, "cumprod");
}

#[test]
fn linear_recurrences() {
    let cpu = Cpu::with_threads(2);
    for shape in [&[700][..], &[5, 300], &[60, 70], &[3, 20, 90]] {
        for axis in 0..shape.len() {
            let (x, _) = (&views(&cpu, DType::F64, shape, 2)[1], ());
            let decay: Vec<f64> = draw(DType::F64, x.values.len(), 3).iter().map(|x| x.tanh()).collect();
            let (a, a_values) = store(&cpu, DType::F64, shape, &decay);
            let both: Vec<f64> = (0..x.values.len()).map(|i| i as f64).collect();
            let expected = lines(shape, axis, &both, |l| {
                let mut y = 0.0;
                l.iter()
                    .map(|&i| {
                        y = a_values[i as usize] * y + x.values[i as usize];
                        y
                    })
                    .collect()
            });
            close(&x.tensor.linear_scan(&a, axis as isize).unwrap(), &expected, 1e-12, &x.what);
        }
    }
}

/// Positions in stable order; NaN is the largest.
fn order(x: &[f64], descending: bool) -> Vec<usize> {
    let key = |i: &usize| if x[*i].is_nan() { f64::MAX } else { x[*i] };
    let mut at: Vec<usize> = (0..x.len()).collect();
    at.sort_by(|a, b| if descending { key(b).total_cmp(&key(a)) } else { key(a).total_cmp(&key(b)) });
    at
}

#[test]
fn sorts_are_stable_on_every_axis_and_layout() {
    let cpu = Cpu::with_threads(2);
    for dtype in DType::ALL {
        for shape in SHAPES {
            for axis in 0..shape.len() {
                for x in views(&cpu, dtype, shape, 4) {
                    for descending in [false, true] {
                        // Zeros of either sign are equal.
                        let values: Vec<f64> = x.values.iter().map(|x| x + 0.0).collect();
                        let (sorted, index) = x.tensor.sort(axis as isize, descending).unwrap();
                        let what = format!("axis {axis} of {}", x.what);
                        let at =
                            lines(shape, axis, &values, |l| order(l, descending).iter().map(|&i| i as f64).collect());
                        let moved =
                            lines(shape, axis, &values, |l| order(l, descending).iter().map(|&i| l[i]).collect());
                        close(&index, &at, 0.0, &what);
                        close(&sorted, &moved, 0.0, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn nan_sorts_as_largest() {
    let cpu = Cpu::with_threads(1);
    let x =
        Tensor::from_vec(&cpu, vec![1f32, f32::NAN, f32::INFINITY, -0.0, 0.0, -f32::NAN, f32::NEG_INFINITY]).unwrap();
    assert_eq!(x.sort(0, false).unwrap().1.to_vec::<i64>().unwrap(), [6, 3, 4, 0, 2, 1, 5]);
    assert_eq!(x.sort(0, true).unwrap().1.to_vec::<i64>().unwrap(), [1, 5, 2, 0, 3, 4, 6]);
    let (top, at) = x.narrow(0, 2, 3).unwrap().topk(2, 0).unwrap();
    assert_eq!((top.to_vec::<f32>().unwrap()[0], at.to_vec::<i64>().unwrap()), (f32::INFINITY, vec![0, 1]));
}

#[test]
fn positions_of_extremes() {
    let cpu = Cpu::with_threads(2);
    for dtype in DType::ALL {
        for shape in &SHAPES[..5] {
            for axis in 0..shape.len() {
                for x in views(&cpu, dtype, shape, 5) {
                    let what = format!("axis {axis} of {}", x.what);
                    let first = |l: &[f64], best: fn(f64, f64) -> f64| {
                        let top = l.iter().copied().reduce(best).unwrap();
                        vec![l.iter().position(|&x| x == top).unwrap() as f64]
                    };
                    let max = lines(shape, axis, &x.values, |l| first(l, f64::max));
                    let min = lines(shape, axis, &x.values, |l| first(l, f64::min));
                    close(&x.tensor.argmax(axis as isize, false).unwrap(), &max, 0.0, &what);
                    close(&x.tensor.argmin(axis as isize, false).unwrap(), &min, 0.0, &what);
                }
            }
        }
    }
}

#[test]
fn the_first_nan_is_an_extreme() {
    let cpu = Cpu::with_threads(1);
    let mut x = vec![1f32; 200];
    (x[3], x[150], x[170]) = (5.0, f32::NAN, f32::NAN);
    let x = Tensor::from_vec(&cpu, x).unwrap();
    let column = x.reshape([200, 1]).unwrap().broadcast_to([200, 3]).unwrap();
    assert_eq!(
        (x.argmax(0, false).unwrap().item().unwrap(), x.argmin(0, false).unwrap().item().unwrap()),
        (150.0, 150.0)
    );
    assert_eq!(column.argmax(0, false).unwrap().to_vec::<i64>().unwrap(), [150; 3]);
    assert_eq!(column.argmin(0, false).unwrap().to_vec::<i64>().unwrap(), [150; 3]);
}
