//! Reductions against host loops over every subset of axes and every layout; their accuracy; what none and NaN give.

mod common;

use common::*;
use numcore::{
    DType, Error, Tensor, TensorMut,
    ops::{Op, PointwiseOps, Reduce, ReduceOps, ViewOps},
    pointwise::Program,
};
use numcore::{ReduceKind, Shape};
use runtime_cpu::Cpu;

const SHAPES: [&[usize]; 9] =
    [&[5], &[10_007], &[3, 5000], &[5000, 3], &[300, 7, 4], &[70, 66], &[2, 3, 4, 5], &[6, 33, 1, 40], &[1, 2, 9000]];

/// Values combined over the axes in `gone` (a set of bits), in `f64`.
fn naive(shape: &[usize], gone: u32, values: &[f64], first: f64, f: fn(f64, f64) -> f64) -> Vec<f64> {
    let kept: Vec<usize> = shape.iter().enumerate().map(|(i, &d)| if gone >> i & 1 == 1 { 1 } else { d }).collect();
    let mut out = vec![first; kept.iter().product()];
    for (n, &x) in values.iter().enumerate() {
        let (mut rest, mut at, mut step) = (n, 0, 1);
        for i in (0..shape.len()).rev() {
            at += rest % shape[i] % kept[i] * step;
            step *= kept[i];
            rest /= shape[i];
        }
        out[at] = f(out[at], x);
    }
    out
}

fn subsets(rank: usize) -> impl Iterator<Item = (u32, Vec<isize>)> {
    (1..1u32 << rank).map(move |set| (set, (0..rank as isize).filter(|&i| set >> i & 1 == 1).collect()))
}

#[test]
fn sums_over_every_subset_of_axes_and_layout() {
    let cpu = Cpu::with_threads(2);
    for shape in SHAPES {
        for x in views(&cpu, DType::F32, shape, 1) {
            for (set, axes) in subsets(shape.len()) {
                let expected = naive(shape, set, &x.values, 0.0, |a, b| a + b);
                let size = naive(shape, set, &x.values, 0.0, |a, b| a + b.abs()).into_iter().fold(1.0, f64::max);
                let got = x.tensor.sum(&axes, false).unwrap();
                close(&got, &expected, 3e-7 * size, &format!("sum {axes:?} of {}", x.what));
            }
        }
    }
}

#[test]
fn extremes_are_exact() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS.into_iter().chain(INTS) {
        for shape in [&[5000][..], &[3, 5000], &[40, 9, 30]] {
            for x in views(&cpu, dtype, shape, 2) {
                for (set, axes) in subsets(shape.len()) {
                    let what = format!("{axes:?} of {}", x.what);
                    let most = naive(shape, set, &x.values, f64::NEG_INFINITY, f64::max);
                    let least = naive(shape, set, &x.values, f64::INFINITY, f64::min);
                    close(&x.tensor.amax(&axes, true).unwrap(), &most, 0.0, &what);
                    close(&x.tensor.amin(&axes, true).unwrap(), &least, 0.0, &what);
                }
            }
        }
    }
}

#[test]
fn every_type_adds_up() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS.into_iter().chain(INTS).chain([DType::Bool]) {
        for shape in [&[2000][..], &[30, 70], &[3000, 5]] {
            for (set, axes) in subsets(shape.len()) {
                let x = &views(&cpu, dtype, shape, 3)[3];
                let expected = naive(shape, set, &x.values, 0.0, |a, b| a + b);
                let size = expected.iter().fold(100.0, |a: f64, b| a.max(b.abs()));
                let tolerance = if dtype.is_float() { tolerance(dtype) * size } else { 0.0 };
                close(&x.tensor.sum(&axes, false).unwrap(), &expected, tolerance, &format!("{axes:?} {}", x.what));
            }
        }
    }
}

#[test]
fn products_and_wrapping() {
    let cpu = Cpu::with_threads(2);
    let x: Vec<f64> = (0..600).map(|i| 1.0 + f64::from(i % 7 - 3) * 0.01).collect();
    for dtype in [DType::F32, DType::F64] {
        let (t, values) = store(&cpu, dtype, &[20, 30], &x);
        close(&t.prod(&[0], false).unwrap(), &naive(&[20, 30], 1, &values, 1.0, |a, b| a * b), 1e-6, "prod 0");
        close(&t.prod(&[1], false).unwrap(), &naive(&[20, 30], 2, &values, 1.0, |a, b| a * b), 1e-6, "prod 1");
    }
    let big = Tensor::full(&cpu, [100], DType::I64, i64::MAX).unwrap();
    let sum = big.sum(&[], false).unwrap().to_vec::<i64>().unwrap();
    assert_eq!(sum, [i64::MAX.wrapping_mul(100)]);
}

#[test]
fn a_program_is_mapped_on_the_way() {
    let cpu = Cpu::with_threads(2);
    let distance = Program::new("distance", |[x, y], [s]| [(x - y) * (x - y) * s]);
    for shape in [&[70, 66][..], &[3, 5000], &[4000, 6]] {
        let (left, right) = (views(&cpu, DType::F32, shape, 4), views(&cpu, DType::F32, shape, 5));
        for (x, y) in left.iter().zip(right.iter().cycle().skip(2)) {
            for (set, _) in subsets(2) {
                let to: Vec<usize> = (0..2).map(|i| if set >> i & 1 == 1 { 1 } else { shape[i] }).collect();
                let op = Op::from(Reduce::sum_of(
                    distance.clone(),
                    [0.5.into()].into_iter().collect(),
                    Shape::new(&to).unwrap(),
                ));
                let mut out = TensorMut::alloc(&cpu, Shape::new(&to).unwrap(), DType::F32).unwrap();
                out.accumulate(&op, &[&x.tensor, &y.tensor]).unwrap();
                out.accumulate(&op, &[&x.tensor, &y.tensor]).unwrap();
                let squares: Vec<f64> = x.values.iter().zip(&y.values).map(|(x, y)| (x - y) * (x - y)).collect();
                let expected = naive(shape, set, &squares, 0.0, |a, b| a + b);
                close(&out.freeze().unwrap(), &expected, 2e-6, &format!("{set:b} {} {}", x.what, y.what));
            }
        }
    }
}

#[test]
fn positions_count_in_a_map_too() {
    let cpu = Cpu::with_threads(2);
    let weighted = Program::build("weighted", 1, 0, |b, x, _| vec![x[0] * b.index()]);
    for shape in [&[50, 40][..], &[2, 3, 4]] {
        for x in views(&cpu, DType::I64, shape, 6) {
            for (set, _) in subsets(shape.len()) {
                let to: Vec<usize> = (0..shape.len()).map(|i| if set >> i & 1 == 1 { 1 } else { shape[i] }).collect();
                let op = Op::from(Reduce::sum_of(weighted.clone(), Default::default(), Shape::new(&to).unwrap()));
                let mut out = TensorMut::alloc(&cpu, Shape::new(&to).unwrap(), DType::I64).unwrap();
                out.accumulate(&op, &[&x.tensor]).unwrap();
                let mapped: Vec<f64> = x.values.iter().enumerate().map(|(i, v)| i as f64 * v).collect();
                close(&out.freeze().unwrap(), &naive(shape, set, &mapped, 0.0, |a, b| a + b), 0.0, &x.what);
            }
        }
    }
}

#[test]
fn long_sums_stay_accurate() {
    let cpu = Cpu::with_threads(2);
    let n = 20_000_000usize;
    let x = Tensor::full(&cpu, [n], DType::F32, 0.1).unwrap();
    let expected = f64::from(0.1f32) * n as f64;
    let relative = |got: f64| (got - expected).abs() / expected;
    assert!(relative(x.sum(&[], false).unwrap().item().unwrap()) < 1e-6);
    let columns = x.reshape([n / 2, 2]).unwrap().sum(&[0], false).unwrap();
    assert!(columns.to_f64s().unwrap().iter().all(|&c| relative(2.0 * c) < 1e-6));
    let wide = x.reshape([n / 1000, 1000]).unwrap().sum(&[0], false).unwrap();
    assert!(wide.to_f64s().unwrap().iter().all(|&c| relative(1000.0 * c) < 1e-6));
    let half = Tensor::full(&cpu, [1 << 20], DType::BF16, 1.0).unwrap();
    assert_eq!(half.sum(&[], false).unwrap().item().unwrap(), f64::from(1 << 20));
}

#[test]
fn nan_wins_and_none_gives_the_identity() {
    let cpu = Cpu::with_threads(2);
    for at in [0, 17, 4999] {
        let mut x = vec![1f32; 5000];
        x[at] = f32::NAN;
        let x = Tensor::from_vec(&cpu, x).unwrap();
        assert!(x.amax(&[], false).unwrap().item().unwrap().is_nan());
        assert!(x.amin(&[], false).unwrap().item().unwrap().is_nan());
        let tall = x.reshape([50, 100]).unwrap();
        let nans = |t: T| t.to_f64s().unwrap().iter().filter(|x| x.is_nan()).count();
        assert_eq!((nans(tall.amax(&[0], false).unwrap()), nans(tall.amin(&[1], false).unwrap())), (1, 1));
    }
    for shape in [[0, 3], [3, 0]] {
        let none = Tensor::ones(&cpu, shape, DType::F32).unwrap();
        for axis in [0, 1] {
            let n = if shape[axis] == 0 { shape[1 - axis] } else { 0 };
            close(&none.sum(&[axis as isize], false).unwrap(), &vec![0.0; n], 0.0, "sum of none");
            close(&none.prod(&[axis as isize], false).unwrap(), &vec![1.0; n], 0.0, "product of none");
        }
    }
    let none = Tensor::ones(&cpu, [0], DType::F32).unwrap();
    let run = |op: ReduceKind| -> Result<f64, Error> {
        let rule = Op::from(Reduce::new(op, [1].into()));
        let mut out = TensorMut::alloc(&cpu, [1].into(), DType::F32)?;
        out.accumulate(&rule, &[&none])?;
        out.freeze()?.item()
    };
    assert_eq!(run(ReduceKind::Sum).unwrap(), 0.0);
    // A maximum or minimum of no elements does not exist; in given memory, it is an error as well.
    assert!(run(ReduceKind::Max).is_err() && run(ReduceKind::Min).is_err());
}

#[test]
fn composed_reductions() {
    let cpu = Cpu::with_threads(2);
    let x = &views(&cpu, DType::F64, &[40, 300], 7)[1];
    let rows: Vec<&[f64]> = x.values.chunks(300).collect();
    let mean = |r: &[f64]| r.iter().sum::<f64>() / 300.0;
    let var = |r: &[f64]| r.iter().map(|x| (x - mean(r)).powi(2)).sum::<f64>() / 299.0;
    let each = |f: &dyn Fn(&[f64]) -> f64| rows.iter().map(|r| f(r)).collect::<Vec<f64>>();
    close(&x.tensor.mean(&[1], false).unwrap(), &each(&mean), 1e-12, "mean");
    close(&x.tensor.var(&[1], 1, false).unwrap(), &each(&var), 1e-12, "var");
    let lse = each(&|r| r.iter().map(|x| x.exp()).sum::<f64>().ln());
    close(&x.tensor.logsumexp(&[1], false).unwrap(), &lse, 1e-12, "logsumexp");
    let positive = x.tensor.gt(1.0).unwrap();
    let any = each(&|r| f64::from(r.iter().any(|&x| x > 1.0)));
    close(&positive.any(&[1], false).unwrap(), &any, 0.0, "any");
}
