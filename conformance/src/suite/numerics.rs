//! Numerical accuracy: offsets, tails, constants. Expected values are formulas in `f64` and identities that hold to the
//! bit.

use autograd::{Var, grad};
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{CrossEntropyOptions, NnOps, Reduction},
    ops::{
        Interpolate, InterpolateOps, Interpolation, PointwiseOps, PoolOps, PoolOptions, ReduceOps, Resize, ScanOps,
        ViewOps,
    },
    pointwise::{Number, Unary},
    rng::Philox,
};

use super::{
    dtypes::{computes, lacks},
    report::{Section, Verdict},
};

/// The reference of an activation's value or slope: a function of `f64`.
type Exact = fn(f64) -> f64;
/// A function of one variable.
type Call<R> = fn(&Var<R>) -> Result<Var<R>>;

pub(crate) fn numerics<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("numerics");
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        if !computes(rt, dtype) {
            section.skip(lacks(dtype));
            continue;
        }
        section.check(format!("constants have no variance {dtype}"), || constants(rt, dtype));
        section.check(format!("norms of constants are 0 {dtype}"), || norms_of_constants(rt, dtype));
        section.check(format!("means of a constant {dtype}"), || means_of_a_constant(rt, dtype));
        section.check(format!("uniform values are below their bound {dtype}"), || below_the_bound(rt, dtype));
        section.check(format!("scans far along an axis {dtype}"), || far_along(rt, dtype));
        if dtype.is_half() {
            continue;
        }
        section.check(format!("cross_entropy of shifted logits {dtype}"), || shifted_logits(rt, dtype));
        section.check(format!("batch_norm around a large mean {dtype}"), || around_a_mean(rt, dtype));
        for (name, call, exact, slope) in tails() {
            section.check(format!("{name} far out {dtype}"), || tail(rt, dtype, call, exact, slope));
        }
    }
    section.check("NaN, infinities and shifts", || kinds_of_numbers(rt));
    section.check("sums and products of narrow integers", || narrow_integers(rt));
    if computes(rt, DType::F64) {
        section.check("angles of every size f64", || angles(rt));
        section.check("deviations and norms are rounded once f32", || rounded_once(rt));
    }
    section
}

fn spacing(dtype: DType) -> f64 {
    if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) }
}

/// Checks that an offset of a row's logits changes no bit of its loss and gradient, as long as it can be added exactly.
fn shifted_logits<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let logits = [0.125, -0.75, 1.25, 0.375];
    let losses = |offset: f64, smoothing: f64, weighted: bool| -> Result<Vec<f64>> {
        let mut values = logits.iter().map(|x| x + offset);
        let x = Var::leaf("x", Tensor::from_f64_fn(rt, [1, 4], dtype, || values.next().unwrap_or(0.0))?)?;
        let mut weights = [0.5, 2.0, 1.0, 0.25].into_iter();
        let w = Var::new(Tensor::from_f64_fn(rt, [4], dtype, || weights.next().unwrap_or(0.0))?);
        let target = Var::new(Tensor::from_slice(rt, [1], &[1i64])?);
        let options =
            CrossEntropyOptions { label_smoothing: smoothing, reduction: Reduction::Sum, ..Default::default() };
        let loss = match weighted {
            true => x.weighted_cross_entropy(&target, &w, options)?,
            false => x.cross_entropy_with(&target, options)?,
        };
        let mut all = loss.value()?.to_f64s()?;
        if let [Some(g)] = &grad(&[&loss], &[&x])?[..] {
            all.extend(g.value()?.to_f64s()?);
        }
        Ok(all)
    };
    let plain = losses(0.0, 0.0, false)?;
    let near = (plain[0] - 2.629_594_8).abs() < 5e-7 && plain[1..].iter().sum::<f64>().abs() < 2.0 * spacing(dtype);
    let mut verdict = Verdict::when(near, || format!("{plain:?}"));
    for (smoothing, weighted) in [(0.0, false), (0.0, true), (0.2, false), (0.2, true)] {
        let want = losses(0.0, smoothing, weighted)?;
        for offset in [100.0, -1e4, 1e4, 1e6] {
            let got = losses(offset, smoothing, weighted)?;
            verdict = verdict.and(Verdict::when(got == want, || {
                format!("offset {offset}, smoothing {smoothing}, weighted {weighted}: {got:?}, without {want:?}")
            }));
        }
    }
    Ok(verdict)
}

/// Values whose sums are rounded.
const LEVELS: [f64; 6] = [100.3, 0.1, -0.7, 1e-3, 33_333.3, -1.0 / 3.0];
const COUNTS: [usize; 6] = [2, 3, 7, 64, 100, 1000];

fn constants<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let mut verdict = Verdict::PASSED;
    for level in LEVELS {
        for n in COUNTS {
            let x = Tensor::full(rt, [3, n], dtype, level)?;
            for (axis, dense) in [(1, x.clone()), (0, x.t()?)] {
                let values = [dense.var(&[axis], 0)?.to_f64s()?, dense.std(&[axis], 1)?.to_f64s()?].concat();
                verdict = verdict.and(Verdict::when(values.iter().all(|&v| v == 0.0), || {
                    format!("variance and deviation of {n} times {level} are {values:?}")
                }));
            }
        }
    }
    Ok(verdict)
}

/// Checks that deviations and norms of `f32` are those of `f64`, rounded. There are small ones around a large mean, and
/// ones whose squares leave the range of `f32`.
fn rounded_once<R: Runtime>(rt: &R) -> Result<Verdict> {
    let all = |x: &Tensor<R>, axis: isize| -> Result<[Vec<f64>; 2]> {
        let rounded = |y: Tensor<R>| y.to_dtype(DType::F32)?.to_f64s();
        Ok([rounded(x.std(&[axis], 1)?)?, rounded(x.norm(&[axis])?)?])
    };
    Verdict::all([(0.0, 1.0), (1e4, 1.0), (0.0, 1e-30), (1e30, 1e25)].into_iter().flat_map(|(mean, deviation)| {
        [0, 1].map(|axis| {
            let x = Tensor::normal(rt, [30, 40], DType::F32, mean, deviation, 5)?;
            let (got, want) = (all(&x, axis)?, all(&x.to_dtype(DType::F64)?, axis)?);
            Ok(Verdict::when(got == want, || format!("{mean} ± {deviation} over {axis}: {got:?}, of f64 {want:?}")))
        })
    }))
}

/// Checks means of constants whose sums are exact: the means must be exact too, over any number of elements.
fn means_of_a_constant<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let mut verdict = Verdict::PASSED;
    for (level, n) in [1.0, 7.0].into_iter().flat_map(|level| [6, 11, 49, 71, 100].map(|n| (level, n))) {
        let (rows, image) = (Tensor::full(rt, [3, n], dtype, level)?, Tensor::full(rt, [1, 1, 7, n], dtype, level)?);
        let pool =
            PoolOptions { stride: [1, 1], padding: [1, 1], count_include_pad: false, ..PoolOptions::new([3, 3]) };
        let area = Interpolate { mode: Interpolation::Area, ..Interpolate::default() };
        for (what, y) in [
            ("mean", rows.mean_all()?),
            ("mean of rows", rows.mean(&[1])?),
            ("mean of a transposed row", rows.t()?.mean(&[0])?),
            ("avg_pool2d", image.avg_pool(&pool)?),
            ("adaptive_avg_pool2d", image.adaptive_avg_pool([5, 1])?),
            ("interpolate", image.interpolate(Resize::Size(&[3, 5]), area)?),
        ] {
            let values = y.to_f64s()?;
            verdict = verdict.and(Verdict::when(values.iter().all(|&v| v == level), || {
                format!("{what} of {n} times {level} is {values:?}")
            }));
        }
    }
    let x = Var::leaf("x", Tensor::ones(rt, [49], dtype)?)?;
    let g = grad(&[&x.mean_all()?.mul(49.0)?], &[&x])?.remove(0);
    let slopes = g.map_or(Ok(Vec::new()), |g| g.value()?.to_f64s())?;
    Ok(verdict.and(Verdict::when(slopes == [1.0; 49], || format!("slopes {slopes:?}"))))
}

/// Checks that uniform values stay below `high`, also where a value would be rounded to it.
fn below_the_bound<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    // Between the last two bounds there is no other number of type `f32`, and none at all of halves.
    Verdict::all([(0.0, 1.0), (-0.5, 0.5), (-2.0, -1.0), (-1.0, 0.0), (8_388_608.0, 8_388_609.0)].map(|(low, high)| {
        let values = Tensor::uniform(rt, [20_000], dtype, low, high, 3)?.to_f64s()?;
        let low = Number::Float(low).cast(dtype).to_f64();
        let outside = values.iter().find(|&&v| !(low..high).contains(&v) && v != low);
        Ok(Verdict::when(outside.is_none(), || format!("{outside:?} is not in [{low}, {high})")))
    }))
}

/// Checks that the last element of a scan has the digits of a sum.
fn far_along<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    const N: usize = 100_000;
    let tenth = Number::Float(0.1).cast(dtype).to_f64();
    let bound = if dtype.is_half() { 4e-3 } else { spacing(dtype) * 250.0 };
    let tenths = Tensor::full(rt, [N], dtype, 0.1)?;
    let ones = Tensor::ones(rt, [N], dtype)?;
    let mut scans = vec![
        ("cumsum", tenths.cumsum(0)?, tenth * N as f64),
        ("linear_scan", tenths.linear_scan(&ones, 0)?, tenth * N as f64),
    ];
    if !dtype.is_half() {
        // Factors that differ in all bits. The roundings of equal ones, or of multiples of 2⁻²³, have one sign, and add
        // up.
        let mut random = Philox::new(7, 0);
        let mut factor = || 1.0 + 2f64.powi(-19) * random.below(1 << 32) as f64 / 2f64.powi(32);
        let factors: Vec<f64> = (0..N).map(|_| Number::Float(factor()).cast(dtype).to_f64()).collect();
        let due = factors.iter().map(|x| (x - 1.0).ln_1p()).sum::<f64>().exp();
        let mut each = factors.into_iter();
        let given = Tensor::from_f64_fn(rt, [N], dtype, || each.next().unwrap_or(1.0))?;
        scans.push(("cumprod", given.cumprod(0)?, due));
    }
    Verdict::all(scans.into_iter().map(|(what, y, want)| {
        let last = y.narrow(0, N - 1, 1)?.to_f64s()?[0];
        Ok(Verdict::when((last / want - 1.0).abs() <= bound, || format!("{what} ends at {last}, due {want}")))
    }))
}

/// Checks sums and products of narrow integers, which are `i64`.
fn narrow_integers<R: Runtime>(rt: &R) -> Result<Verdict> {
    Verdict::all([DType::U8, DType::I32, DType::U32, DType::Bool].map(|dtype| {
        let (level, n) = if dtype == DType::Bool { (1i64, 300) } else { (200, 5) };
        let x = Tensor::full(rt, [n], dtype, level)?;
        let (sum, product) = (level * n as i64, level.pow(n as u32));
        let all = [(x.sum_all()?, sum), (x.cumsum(0)?.amax_all()?, sum), (x.prod_all()?, product)];
        let all = all.into_iter().chain([(x.cumprod(0)?.amax_all()?, product)]);
        Verdict::all(all.map(|(got, want)| {
            let got = got.to_vec::<i64>()?;
            Ok(Verdict::when(got == [want], || format!("{got:?} of {dtype}, due {want}")))
        }))
    }))
}

fn norms_of_constants<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let mut verdict = Verdict::PASSED;
    for level in LEVELS {
        for n in COUNTS {
            let rows = Tensor::full(rt, [2, n], dtype, level)?.layer_norm(None, None, 1e-5)?;
            let groups = Tensor::full(rt, [2, 4, n], dtype, level)?.group_norm(2, None, None, 1e-5)?;
            let batch = Tensor::full(rt, [n, 3], dtype, level)?.batch_norm_train(None, None, 1e-5)?.0;
            for (what, y) in [("layer_norm", rows), ("group_norm", groups), ("batch_norm", batch)] {
                let largest = y.to_f64s()?.iter().fold(0.0, |m: f64, v| if v.is_nan() { *v } else { m.max(v.abs()) });
                verdict = verdict
                    .and(Verdict::when(largest == 0.0, || format!("{what} of {n} times {level} reaches {largest}")));
            }
        }
    }
    Ok(verdict)
}

/// Checks the gradient of batch norm's weight, where the mean is 50 times the deviation, against sums in `f64`.
fn around_a_mean<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    const N: usize = 512;
    let mut rng = numcore::rng::Philox::new(5, 0);
    let x = Tensor::from_f64_fn(rt, [N, 1], dtype, || 50.0 + rng.normal())?;
    let g = Tensor::from_f64_fn(rt, [N, 1], dtype, || 0.5 + rng.normal())?;
    let (weight, bias) = (Tensor::ones(rt, [1], dtype)?, Tensor::zeros(rt, [1], dtype)?);
    let (weight, bias) = (Var::leaf("weight", weight)?, Var::leaf("bias", bias)?);
    let y = Var::new(x.clone()).batch_norm_train(Some(&weight), Some(&bias), 1e-5)?.0;
    let sum = y.mul(&Var::new(g.clone()))?.sum_all()?;
    let got = match &grad(&[&sum], &[&weight])?[..] {
        [Some(g)] => g.value()?.item()?,
        _ => f64::NAN,
    };
    let (x, g) = (x.to_f64s()?, g.to_f64s()?);
    let mean = x.iter().sum::<f64>() / N as f64;
    let mean = mean + x.iter().map(|x| x - mean).sum::<f64>() / N as f64;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / N as f64;
    let terms: Vec<f64> = x.iter().zip(&g).map(|(x, g)| g * (x - mean) / (variance + 1e-5).sqrt()).collect();
    let (want, size) = (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
    // A mean of 50 is rounded by up to 16 ULP of 1, an error that all terms share.
    let tolerance = 20.0 * spacing(dtype) * size;
    Ok(Verdict::when((got - want).abs() <= tolerance, || format!("{got}, exactly {want} within {tolerance:.1e}")))
}

/// Checks the classification of NaN and finite values, and that moved values keep their bits.
fn kinds_of_numbers<R: Runtime>(rt: &R) -> Result<Verdict> {
    let x = Tensor::from_slice(rt, [6], &[f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MAX])?;
    let truth =
        [x.isnan()?, x.isinf()?, x.isfinite()?].iter().map(|t| t.to_vec::<bool>()).collect::<Result<Vec<_>>>()?;
    let (t, f) = (true, false);
    let want = [vec![t, t, f, f, f, f], vec![f, f, t, t, f, f], vec![f, f, f, f, t, t]];
    let bits = Tensor::from_slice(rt, [3], &[-5i32, 1, i32::MAX])?;
    let (left, right) = (bits.shl(2.0)?.to_vec::<i32>()?, bits.shr(&bits.mul(0.0)?.add(1.0)?)?.to_vec::<i32>()?);
    let moved = left == [-20, 4, -4] && right == [-3, 0, i32::MAX >> 1];
    Ok(Verdict::when(truth == want, || format!("{truth:?}"))
        .and(Verdict::when(moved, || format!("{left:?} {right:?}"))))
}

fn erfc(x: f64) -> f64 {
    Unary::Erfc.eval(Number::Float(x)).to_f64()
}

fn normal(x: f64) -> f64 {
    0.5 * erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// The argument `2u` of the tanh form of gelu, and its slope.
fn inner(x: f64) -> (f64, f64) {
    let c = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    (c * (x + 0.044_715 * x * x * x), c * (1.0 + 3.0 * 0.044_715 * x * x))
}

fn tails<R: Runtime>() -> Vec<(&'static str, Call<R>, Exact, Exact)> {
    const SELU: f64 = 1.050_700_987_355_480_5 * 1.673_263_242_354_377_2;
    vec![
        ("expm1", |x| x.expm1(), f64::exp_m1, f64::exp),
        ("elu", |x| x.elu(0.7), |x| 0.7 * x.exp_m1(), |x| 0.7 * x.exp()),
        ("selu", |x| x.selu(), |x| SELU * x.exp_m1(), |x| SELU * x.exp()),
        ("asinh", |x| x.asinh(), f64::asinh, |x| 1.0 / (1.0 + x * x).sqrt()),
        ("acosh", |x| x.neg()?.add(1.0)?.acosh(), |x| (1.0 - x).acosh(), |x| -1.0 / (x * (x - 2.0)).sqrt()),
        ("erfc", |x| x.neg()?.erfc(), |x| erfc(-x), |x| 2.0 * (-x * x).exp() / std::f64::consts::PI.sqrt()),
        ("gelu", |x| x.gelu(), |x| x * normal(x), |x| normal(x) + x * density(x)),
        (
            "gelu_tanh",
            |x| x.gelu_tanh(),
            |x| x / (1.0 + (-inner(x).0).exp()),
            |x| {
                let (u, du) = inner(x);
                let s = 1.0 / (1.0 + (-u).exp());
                s + x * s * du / (1.0 + u.exp())
            },
        ),
    ]
}

/// Checks values and slopes from −0.5 down to −9, each relative to itself. A slope is a difference of two terms; an
/// argument's own rounding is multiplied by up to its square.
fn tail<R: Runtime>(rt: &R, dtype: DType, call: Call<R>, exact: Exact, slope: Exact) -> Result<Verdict> {
    let points: Vec<f64> = (4..72).map(|i| f64::from(i) * -0.125).chain([-12.0, -17.0]).collect();
    let smallest = if dtype == DType::F64 { f64::MIN_POSITIVE } else { f64::from(f32::MIN_POSITIVE) };
    let mut next = points.iter().copied();
    let x = Var::leaf("x", Tensor::from_f64_fn(rt, [points.len()], dtype, || next.next().unwrap_or(0.0))?)?;
    let y = call(&x)?;
    let slopes = match &grad(&[&y.sum_all()?], &[&x])?[..] {
        [Some(g)] => g.value()?.to_f64s()?,
        _ => Vec::new(),
    };
    let mut verdict = Verdict::PASSED;
    for (what, got, exact) in [("value", y.value()?.to_f64s()?, exact), ("slope", slopes, slope)] {
        for (&x, got) in points.iter().zip(got) {
            let (want, tolerance) = (exact(x), spacing(dtype) * (8.0 + 4.0 * x * x));
            let near = want.abs() < smallest / tolerance || (got - want).abs() <= tolerance * want.abs();
            // The slope of gelu passes through 0 near −0.75.
            let zero = what == "slope" && (got - want).abs() <= 8.0 * spacing(dtype) && (-1.0..-0.5).contains(&x);
            verdict =
                verdict.and(Verdict::when(near || zero, || format!("{what} at {x} is {got:e}, exactly {want:e}")));
        }
    }
    Ok(verdict)
}

/// Checks sines, cosines and tangents of values far beyond 2⁴⁵, and of infinities.
fn angles<R: Runtime>(rt: &R) -> Result<Verdict> {
    let mut rng = numcore::rng::Philox::new(3, 0);
    let mut points: Vec<f64> = (0..500).map(|i| (1.0 + rng.uniform()) * 2f64.powi(40 + 2 * (i % 490))).collect();
    points.extend([1e18, -1e18, 1e300, f64::MAX, 35_184_372_088_833.0, 1.0, -0.0, f64::INFINITY, f64::NAN]);
    let x = Tensor::from_slice(rt, [points.len()], &points)?;
    let mut verdict = Verdict::PASSED;
    let rows: [(&str, Tensor<R>, Exact); 3] =
        [("sin", x.sin()?, f64::sin), ("cos", x.cos()?, f64::cos), ("tan", x.tan()?, f64::tan)];
    for (name, got, exact) in rows {
        for (&x, got) in points.iter().zip(got.to_vec::<f64>()?) {
            let want = exact(x);
            let near = got.is_nan() && want.is_nan() || (got - want).abs() <= 4.0 * f64::EPSILON * want.abs();
            verdict = verdict.and(Verdict::when(near, || format!("{name}({x:e}) is {got}, exactly {want}")));
        }
    }
    Ok(verdict)
}
