//! Reductions over every subset of axes and every layout; their accuracy; their results for no elements and for NaN.

use numcore::{
    DType, ReduceKind, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Op, PointwiseOps, Reduce, ReduceOps, ViewOps},
    pointwise::Program,
};

use super::known::{FLOATS, INTS, InMemory, Known, NUMBERS, close, tolerance};
use crate::suite::{
    dtypes::computed,
    report::{Section, Verdict},
};

const SHAPES: [&[usize]; 9] =
    [&[5], &[10_007], &[3, 5000], &[5000, 3], &[300, 7, 4], &[70, 66], &[2, 3, 4, 5], &[6, 33, 1, 40], &[1, 2, 9000]];

pub(crate) fn reduce<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("reductions");
    let s = &mut section;
    for shape in SHAPES {
        s.check(format!("sums of {shape:?}"), || sums(rt, shape));
    }
    for dtype in computed(rt, s, "extremes", NUMBERS) {
        for shape in [&[5000][..], &[3, 5000], &[40, 9, 30]] {
            s.check(format!("extremes of {dtype} {shape:?}"), || extremes(rt, dtype, shape));
        }
    }
    for dtype in computed(rt, s, "sums", FLOATS.into_iter().chain(INTS).chain([DType::Bool])) {
        for shape in [&[2000][..], &[30, 70], &[3000, 5]] {
            s.check(format!("sums of {dtype} {shape:?}"), || sums_of_type(rt, dtype, shape));
        }
    }
    for dtype in computed(rt, s, "products", [DType::F32, DType::F64]) {
        s.check(format!("products of {dtype}"), || products(rt, dtype));
    }
    s.check("sums of i64 wrap", || wrapping(rt));
    for shape in [&[70, 66][..], &[3, 5000], &[4000, 6]] {
        s.check(format!("a program of {shape:?} that is summed"), || mapped(rt, shape));
    }
    for shape in [&[50, 40][..], &[2, 3, 4]] {
        s.check(format!("positions of {shape:?} that are summed"), || positions(rt, shape));
    }
    s.check("long sums stay accurate", || long_sums(rt));
    s.check("NaN wins", || nan_wins(rt));
    s.check("no elements give the identity", || identities(rt));
    for dtype in computed(rt, s, "composed reductions", [DType::F64]) {
        s.check(format!("composed reductions of {dtype}"), || composed(rt, dtype));
    }
    section
}

/// Values combined over the axes in `gone` (a set of bits), in `f64`.
fn naive(shape: &[usize], gone: u32, values: &[f64], first: f64, f: fn(f64, f64) -> f64) -> Vec<f64> {
    let kept = kept(shape, gone);
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

/// The shape with a size of 1 in place of the axes in `gone`.
fn kept(shape: &[usize], gone: u32) -> Vec<usize> {
    shape.iter().enumerate().map(|(i, &d)| if gone >> i & 1 == 1 { 1 } else { d }).collect()
}

/// Every set of axes but the empty one, as bits and as a list.
fn subsets(rank: usize) -> impl Iterator<Item = (u32, Vec<isize>)> {
    (1..1u32 << rank).map(move |set| (set, (0..rank as isize).filter(|&i| set >> i & 1 == 1).collect()))
}

fn sums<R: Runtime>(rt: &R, shape: &[usize]) -> Result<Verdict> {
    let operands = Known::all(rt, DType::F32, shape, 1)?;
    Verdict::all(operands.iter().flat_map(|x| subsets(shape.len()).map(move |axes| (x, axes))).map(
        |(x, (set, axes))| {
            let want = naive(shape, set, &x.values, 0.0, |a, b| a + b);
            let size = naive(shape, set, &x.values, 0.0, |a, b| a + b.abs()).into_iter().fold(1.0, f64::max);
            x.expect(&format!("sum over {axes:?}"), &x.tensor.sum(&axes)?, &want, 3e-7 * size)
        },
    ))
}

fn extremes<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    let operands = Known::all(rt, dtype, shape, 2)?;
    Verdict::all(operands.iter().flat_map(|x| subsets(shape.len()).map(move |axes| (x, axes))).map(
        |(x, (set, axes))| {
            let most = naive(shape, set, &x.values, f64::NEG_INFINITY, f64::max);
            let least = naive(shape, set, &x.values, f64::INFINITY, f64::min);
            let largest = x.expect(&format!("amax over {axes:?}"), &x.tensor.amax_keepdim(&axes)?, &most, 0.0)?;
            Ok(largest.and(x.expect(&format!("amin over {axes:?}"), &x.tensor.amin_keepdim(&axes)?, &least, 0.0)?))
        },
    ))
}

fn sums_of_type<R: Runtime>(rt: &R, dtype: DType, shape: &[usize]) -> Result<Verdict> {
    let x = Known::drawn(rt, dtype, shape, 3, InMemory::Part)?;
    Verdict::all(subsets(shape.len()).map(|(set, axes)| {
        let want = naive(shape, set, &x.values, 0.0, |a, b| a + b);
        let size = want.iter().fold(100.0, |a: f64, b| a.max(b.abs()));
        let bound = if dtype.is_float() { tolerance(dtype) * size } else { 0.0 };
        x.expect(&format!("sum over {axes:?}"), &x.tensor.sum(&axes)?, &want, bound)
    }))
}

fn products<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let values: Vec<f64> = (0..600).map(|i| 1.0 + f64::from(i % 7 - 3) * 0.01).collect();
    let x = Known::dense(rt, dtype, &[20, 30], &values)?;
    Verdict::all([0, 1].into_iter().map(|axis| {
        let want = naive(&[20, 30], 1 << axis, &x.values, 1.0, |a, b| a * b);
        x.expect(&format!("prod over {axis}"), &x.tensor.prod(&[axis])?, &want, 1e-6)
    }))
}

fn wrapping<R: Runtime>(rt: &R) -> Result<Verdict> {
    let sum = Tensor::full(rt, [100], DType::I64, i64::MAX)?.sum_all()?.to_vec::<i64>()?;
    Ok(Verdict::when(sum == [i64::MAX.wrapping_mul(100)], || format!("{sum:?}")))
}

/// Reduces a program's values to the shape `to`, accumulated `times` times.
fn reduced<R: Runtime>(op: Reduce, to: &[usize], ins: &[&Tensor<R>], times: usize) -> Result<Tensor<R>> {
    let mut out = TensorMut::alloc(ins[0].runtime(), Shape::new(to)?, ins[0].dtype())?;
    let op = Op::from(op);
    for _ in 0..times {
        out.accumulate(&op, ins)?;
    }
    out.freeze()
}

fn mapped<R: Runtime>(rt: &R, shape: &[usize]) -> Result<Verdict> {
    let distance = Program::new("distance", |[x, y], [s]| [(x - y) * (x - y) * s]);
    let (left, right) = (Known::all(rt, DType::F32, shape, 4)?, Known::all(rt, DType::F32, shape, 5)?);
    let pairs = left.iter().zip(right.iter().cycle().skip(2));
    Verdict::all(pairs.flat_map(|(x, y)| subsets(2).map(move |(set, _)| (x, y, set))).map(|(x, y, set)| {
        let to = kept(shape, set);
        let op = Reduce::sum_of(distance.clone(), [0.5.into()].into_iter().collect(), Shape::new(&to)?);
        let got = reduced(op, &to, &[&x.tensor, &y.tensor], 2)?;
        let squares: Vec<f64> = x.values.iter().zip(&y.values).map(|(x, y)| (x - y) * (x - y)).collect();
        let want = naive(shape, set, &squares, 0.0, |a, b| a + b);
        x.expect(&format!("distances to {} over {set:b}", y.what), &got, &want, 2e-6)
    }))
}

fn positions<R: Runtime>(rt: &R, shape: &[usize]) -> Result<Verdict> {
    let weighted = Program::build("weighted", 1, 0, |b, x, _| vec![x[0] * b.index()]);
    let operands = Known::all(rt, DType::I64, shape, 6)?;
    Verdict::all(operands.iter().flat_map(|x| subsets(shape.len()).map(move |(set, _)| (x, set))).map(|(x, set)| {
        let to = kept(shape, set);
        let op = Reduce::sum_of(weighted.clone(), Default::default(), Shape::new(&to)?);
        let got = reduced(op, &to, &[&x.tensor], 1)?;
        let weighted: Vec<f64> = x.values.iter().enumerate().map(|(i, v)| i as f64 * v).collect();
        x.expect(&format!("weighted over {set:b}"), &got, &naive(shape, set, &weighted, 0.0, |a, b| a + b), 0.0)
    }))
}

/// Checks a sum of twenty million equal numbers, whose rounding errors would add up.
fn long_sums<R: Runtime>(rt: &R) -> Result<Verdict> {
    const N: usize = 20_000_000;
    let x = Tensor::full(rt, [N], DType::F32, 0.1)?;
    let want = f64::from(0.1f32) * N as f64;
    let accurate = |what: &str, parts: Tensor<R>| {
        let parts = parts.to_f64s()?;
        let each = want / parts.len() as f64;
        let worst = parts.iter().fold(0.0, |worst: f64, part| worst.max((part - each).abs() / each));
        Ok(Verdict::when(worst < 1e-6, || format!("{what}: relative error {worst:e}")))
    };
    let ones = Tensor::full(rt, [1 << 20], DType::BF16, 1.0)?;
    Verdict::all([
        accurate("all", x.sum_all()?),
        accurate("two columns", x.reshape([N / 2, 2])?.sum(&[0])?),
        accurate("a thousand columns", x.reshape([N / 1000, 1000])?.sum(&[0])?),
        close("the sum of 2²⁰ ones in bf16", &ones.sum_all()?, &[f64::from(1 << 20)], 0.0),
    ])
}

fn nan_wins<R: Runtime>(rt: &R) -> Result<Verdict> {
    Verdict::all([0, 17, 4999].into_iter().map(|at| {
        let mut values = vec![1f32; 5000];
        values[at] = f32::NAN;
        let x = Tensor::from_vec(rt, values)?;
        let tall = x.reshape([50, 100])?;
        let count = |t: Tensor<R>| t.to_f64s().map(|values| values.iter().filter(|x| x.is_nan()).count());
        let all = [count(x.amax_all()?)?, count(x.amin_all()?)?];
        let lines = [count(tall.amax(&[0])?)?, count(tall.amin(&[1])?)?];
        Ok(Verdict::when((all, lines) == ([1; 2], [1; 2]), || format!("NaN at {at} is in {all:?} and {lines:?}")))
    }))
}

fn identities<R: Runtime>(rt: &R) -> Result<Verdict> {
    let mut verdict = Verdict::PASSED;
    for (shape, axis) in [([0, 3], 0), ([0, 3], 1), ([3, 0], 0), ([3, 0], 1)] {
        let none = Tensor::ones(rt, shape, DType::F32)?;
        let n = if shape[axis] == 0 { shape[1 - axis] } else { 0 };
        let sums = none.sum(&[axis as isize])?;
        let products = none.prod(&[axis as isize])?;
        verdict = verdict.and(close("the sum of no elements", &sums, &vec![0.0; n], 0.0)?).and(close(
            "the product of no elements",
            &products,
            &vec![1.0; n],
            0.0,
        )?);
    }
    let none = Tensor::ones(rt, [0], DType::F32)?;
    let of_none = |kind: ReduceKind| reduced(Reduce::new(kind, [1].into()), &[1], &[&none], 1);
    verdict = verdict.and(close("the sum into given memory", &of_none(ReduceKind::Sum)?, &[0.0], 0.0)?);
    // A maximum or minimum of no elements does not exist; in given memory, it is an error as well.
    let refused = [ReduceKind::Max, ReduceKind::Min].map(|kind| of_none(kind).is_err());
    Ok(verdict.and(Verdict::when(refused == [true; 2], || "an extreme of no elements is no error")))
}

fn composed<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let x = Known::drawn(rt, dtype, &[40, 300], 7, InMemory::Transposed)?;
    let mean = |r: &[f64]| r.iter().sum::<f64>() / 300.0;
    let var = |r: &[f64]| r.iter().map(|x| (x - mean(r)).powi(2)).sum::<f64>() / 299.0;
    let log_sum = |r: &[f64]| r.iter().map(|x| x.exp()).sum::<f64>().ln();
    let any = |r: &[f64]| f64::from(r.iter().any(|&x| x > 1.0));
    let each = |f: &dyn Fn(&[f64]) -> f64| x.values.chunks(300).map(f).collect::<Vec<f64>>();
    Verdict::all([
        x.expect("mean", &x.tensor.mean(&[1])?, &each(&mean), 1e-12),
        x.expect("var", &x.tensor.var(&[1], 1)?, &each(&var), 1e-12),
        x.expect("logsumexp", &x.tensor.logsumexp(&[1])?, &each(&log_sum), 1e-12),
        x.expect("any", &x.tensor.gt(1.0)?.any(&[1])?, &each(&any), 0.0),
    ])
}
