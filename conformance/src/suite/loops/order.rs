//! Recurrences, order and extremes along an axis.

use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{ReduceOps, ScanOps, SortOps, ViewOps},
};

use super::known::{FLOATS, InMemory, Known, close, draw, tolerance};
use crate::suite::{
    dtypes::computed,
    report::{Section, Verdict},
};

/// Shapes, the last of which has no elements, and so no extremes.
const SHAPES: [&[usize]; 6] = [&[1], &[700], &[5, 300], &[300, 70], &[3, 4, 90], &[2, 0, 3]];

pub(crate) fn order<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("scans and sorts");
    let s = &mut section;
    for dtype in computed(rt, s, "cumsum", FLOATS.into_iter().chain([DType::I64])) {
        for shape in SHAPES {
            s.check(format!("cumsum of {dtype} {shape:?}"), || running_sums(rt, dtype, shape));
        }
    }
    s.check("cumprod", || running_products(rt));
    for dtype in computed(rt, s, "linear_scan", [DType::F64]) {
        for shape in [&[700][..], &[5, 300], &[60, 70], &[3, 20, 90]] {
            s.check(format!("linear_scan of {dtype} {shape:?}"), || recurrences(rt, dtype, shape));
        }
    }
    for dtype in computed(rt, s, "sort", DType::ALL) {
        for shape in SHAPES {
            s.check(format!("sort of {dtype} {shape:?}"), || sorts(rt, dtype, shape));
        }
        for shape in &SHAPES[..5] {
            s.check(format!("argmax and argmin of {dtype} {shape:?}"), || extremes(rt, dtype, shape));
        }
    }
    s.check("NaN is sorted as the largest", || nan_is_largest(rt));
    s.check("the first NaN is an extreme", || nan_is_extreme(rt));
    section
}

/// Applies `f` to every row of values along an axis.
fn rows(shape: &[usize], axis: usize, values: &[f64], f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let (size, after) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let before: usize = shape[..axis].iter().product();
    let row = |n: usize| {
        let first = n / after * size * after + n % after;
        f(&(0..size).map(|i| values[first + i * after]).collect::<Vec<_>>())
    };
    let results: Vec<Vec<f64>> = (0..before * after).map(row).collect();
    let long = results.first().map_or(0, Vec::len);
    let at = |i: usize| results[i / (long * after) * after + i % after][i / after % long];
    (0..before * long * after).map(at).collect()
}

fn running(row: &[f64], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    let mut so_far = None;
    row.iter().map(|&x| *so_far.insert(so_far.map_or(x, |y| f(y, x)))).collect()
}

/// Checks every layout of operands along every axis.
fn along_axes<R: Runtime>(
    rt: &R,
    dtype: DType,
    shape: &[usize],
    seed: u64,
    check: impl Fn(&Known<R>, usize) -> Result<Verdict>,
) -> Result<Verdict> {
    let operands = Known::all(rt, dtype, shape, seed)?;
    Verdict::all(operands.iter().flat_map(|x| (0..shape.len()).map(|axis| check(x, axis))))
}

fn running_sums<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    along_axes(rt, dtype, shape, 1, |x, axis| {
        let sums = rows(shape, axis, &x.values, |row| running(row, |a, b| a + b));
        let size = sums.iter().fold(30.0, |a: f64, b| a.max(b.abs()));
        let bound = if dtype == DType::I64 { 0.0 } else { 2.0 * tolerance(dtype) * size };
        x.expect(&format!("cumsum along {axis}"), &x.tensor.cumsum(axis as isize)?, &sums, bound)
    })
}

fn running_products<R: Runtime>(rt: &R) -> Result<Verdict> {
    let values: Vec<f64> = (0..360).map(|i| 1.0 + f64::from(i % 5 - 2) * 0.1).collect();
    let x = Known::dense(rt, DType::F32, &[40, 9], &values)?;
    let want = rows(&[40, 9], 0, &x.values, |row| running(row, |a, b| a * b));
    x.expect("cumprod along 0", &x.tensor.cumprod(0)?, &want, 1e-5)
}

fn recurrences<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    let x = Known::drawn(rt, dtype, shape, 2, InMemory::Transposed)?;
    let decays: Vec<f64> = draw(dtype, x.values.len(), 3).iter().map(|x| x.tanh()).collect();
    let decay = Known::dense(rt, dtype, shape, &decays)?;
    let positions: Vec<f64> = (0..x.values.len()).map(|i| i as f64).collect();
    Verdict::all((0..shape.len()).map(|axis| {
        let recurrence = |row: &[f64]| {
            let mut y = 0.0;
            let mut step = |i: usize| {
                y = decay.values[i] * y + x.values[i];
                y
            };
            row.iter().map(|&i| step(i as usize)).collect()
        };
        let want = rows(shape, axis, &positions, recurrence);
        let got = x.tensor.linear_scan(&decay.tensor, axis as isize)?;
        x.expect(&format!("linear_scan along {axis}"), &got, &want, 1e-12)
    }))
}

/// The positions of elements in stable order; NaN is the largest.
fn sorted(row: &[f64], descending: bool) -> Vec<usize> {
    let key = |i: &usize| if row[*i].is_nan() { f64::MAX } else { row[*i] };
    let mut at: Vec<usize> = (0..row.len()).collect();
    at.sort_by(|a, b| if descending { key(b).total_cmp(&key(a)) } else { key(a).total_cmp(&key(b)) });
    at
}

/// Checks that sorts are stable, along every axis and in both directions.
fn sorts<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    along_axes(rt, dtype, shape, 4, |x, axis| {
        // Zeros of either sign are equal.
        let values: Vec<f64> = x.values.iter().map(|x| x + 0.0).collect();
        Verdict::all([false, true].into_iter().map(|descending| {
            let (got, index) = x.tensor.sort(axis as isize, descending)?;
            let at = rows(shape, axis, &values, |row| sorted(row, descending).iter().map(|&i| i as f64).collect());
            let moved = rows(shape, axis, &values, |row| sorted(row, descending).iter().map(|&i| row[i]).collect());
            let what = format!("sort along {axis}, descending {descending},");
            Ok(x.expect(&format!("positions: {what}"), &index, &at, 0.0)?.and(x.expect(&what, &got, &moved, 0.0)?))
        }))
    })
}

fn nan_is_largest<R: Runtime>(rt: &R) -> Result<Verdict> {
    let values = [1f32, f32::NAN, f32::INFINITY, -0.0, 0.0, -f32::NAN, f32::NEG_INFINITY];
    let x = Tensor::from_slice(rt, [values.len()], &values)?;
    let orders = [false, true].map(|descending| x.sort(0, descending).and_then(|(_, index)| index.to_vec::<i64>()));
    let [ascending, descending] = orders;
    let (top, at) = x.narrow(0, 2, 3)?.topk(2, 0)?;
    let got = (ascending?, descending?, top.to_vec::<f32>()?[0], at.to_vec::<i64>()?);
    let want = (vec![6, 3, 4, 0, 2, 1, 5], vec![1, 5, 2, 0, 3, 4, 6], f32::INFINITY, vec![0, 1]);
    Ok(Verdict::when(got == want, || format!("{got:?}, expected {want:?}")))
}

/// Checks the position of the first of the largest and of the smallest elements, in every layout along every axis.
fn extremes<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    let first = |row: &[f64], best: fn(f64, f64) -> f64| {
        let most = row.iter().copied().fold(row[0], best);
        vec![row.iter().position(|&x| x == most).unwrap_or(row.len()) as f64]
    };
    along_axes(rt, dtype, shape, 5, |x, axis| {
        let most = rows(shape, axis, &x.values, |row| first(row, f64::max));
        let least = rows(shape, axis, &x.values, |row| first(row, f64::min));
        let largest = x.expect(&format!("argmax along {axis}"), &x.tensor.argmax(axis as isize)?, &most, 0.0)?;
        let smallest = x.tensor.argmin(axis as isize)?;
        Ok(largest.and(x.expect(&format!("argmin along {axis}"), &smallest, &least, 0.0)?))
    })
}

fn nan_is_extreme<R: Runtime>(rt: &R) -> Result<Verdict> {
    let mut values = [1f32; 200];
    (values[3], values[150], values[170]) = (5.0, f32::NAN, f32::NAN);
    let x = Tensor::from_slice(rt, [200], &values)?;
    let columns = x.reshape([200, 1])?.broadcast_to([200, 3])?;
    Verdict::all([
        close("argmax", &x.argmax(0)?, &[150.0], 0.0),
        close("argmin", &x.argmin(0)?, &[150.0], 0.0),
        close("argmax of columns", &columns.argmax(0)?, &[150.0; 3], 0.0),
        close("argmin of columns", &columns.argmin(0)?, &[150.0; 3], 0.0),
    ])
}
