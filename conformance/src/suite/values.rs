//! Creation and conversion of values: casts between all types, creation, random values, upload and download.

use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{PointwiseOps, ViewOps},
    pointwise::Number,
    rng::{Philox, philox4x32_10},
};

use super::{
    dtypes::{casts, computes, lacks},
    loops::upload,
    report::{Section, Verdict},
};

pub(crate) fn values<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("values");
    let stored: Vec<DType> = DType::ALL.into_iter().filter(|d| rt.capabilities().storage.contains(d)).collect();
    for &from in &stored {
        section.check(format!("{from} to the host and back"), || round_trip(rt, from));
        for &to in &stored {
            if from != to && !(casts(rt, from) && casts(rt, to)) {
                let lacking = if casts(rt, from) { to } else { from };
                section.skip(format!("{from} as {to}: {}", lacks(lacking)));
                continue;
            }
            section.check(format!("{from} as {to}"), || cast(rt, from, to));
        }
        section.check(format!("numbers of {from}"), || numbers(rt, from));
    }
    for dtype in DType::ALL.into_iter().filter(|d| !stored.contains(d)) {
        section.check(format!("{dtype} is refused"), || refused(rt, dtype));
    }
    section.check("uniform is Philox", || uniform(rt));
    section.check("bernoulli is Philox", || bernoulli(rt));
    section.check("normal and permutation are the host's", || drawn(rt));
    section.check("dropout's mask", || dropout(rt));
    section
}

/// Values that casts treat differently: ties, ends of ranges, both zeros, infinities and NaN.
fn interesting(dtype: DType) -> Vec<f64> {
    let whole = [0.0, 1.0, 2.0, 7.0, 100.0, 127.0, 128.0, 255.0];
    let signed = [-1.0, -2.0, -100.0, -128.0, -32_769.0, 65_536.0, 2_147_483_647.0, -2_147_483_648.0];
    let wide = [4_294_967_296.0, -9_007_199_254_740_992.0, 9_223_372_036_854_774_784.0];
    let real = [
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        0.1,
        -1.7,
        255.9,
        256.0,
        300.7,
        65_504.0,
        65_520.0,
        1e-8,
        3e38,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        -0.0,
        4_294_967_295.5,
        1e10,
        -1e10,
        1e20,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ];
    match dtype {
        DType::Bool => vec![0.0, 1.0],
        DType::U8 => whole.to_vec(),
        DType::U32 => [&whole[..], &[65_536.0, 4_294_967_295.0]].concat(),
        DType::I32 => [whole, signed].concat(),
        DType::I64 => [&whole[..], &signed, &wide].concat(),
        _ => [&whole[..], &signed, &real].concat(),
    }
}

fn tensor<R: Runtime>(rt: &R, dtype: DType, values: &[f64]) -> Result<Tensor<R>> {
    Ok(upload(rt, dtype, &[values.len()], values)?.0)
}

fn number(dtype: DType, v: f64) -> Number {
    match dtype {
        DType::Bool => Number::Bool(v != 0.0),
        d if d.is_int() => Number::Int(v as i64),
        d => Number::Float(v).cast(d),
    }
}

fn same(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn cast<R: Runtime>(rt: &R, from: DType, to: DType) -> Result<Verdict> {
    let values = interesting(from);
    let got = tensor(rt, from, &values)?.to_dtype(to)?.to_f64s()?;
    for (v, g) in values.iter().zip(&got) {
        let want = number(from, *v).cast(to).to_f64();
        if !same(*g, want) {
            return Ok(Verdict::failed(format!("{v:?} becomes {g:?}, expected {want:?}")));
        }
    }
    Ok(Verdict::PASSED)
}

/// Checks that uploaded values come back, also from views, whose elements are gathered before the download.
fn round_trip<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let pool = interesting(dtype);
    let values: Vec<f64> = (0..35).map(|i| pool[i * 3 % pool.len()]).collect();
    let stored: Vec<f64> = values.iter().map(|&v| number(dtype, v).to_f64()).collect();
    let x = tensor(rt, dtype, &values)?.reshape([5, 7])?;
    let whole = x.to_f64s()?;
    let seen = x.t()?.flip(&[0])?.to_f64s()?;
    let turned: Vec<f64> = (0..35).map(|k| stored[k % 5 * 7 + (6 - k / 5)]).collect();
    let copied = x.t()?.copy()?.t()?.to_f64s()?;
    let all = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| same(*a, *b));
    Ok(Verdict::when(all(&whole, &stored) && all(&seen, &turned) && all(&copied, &stored), || {
        format!("{whole:?}, expected {stored:?}; turned {seen:?}, expected {turned:?}")
    }))
}

/// Checks that a type that is not stored is refused by name, in creation and in a cast.
fn refused<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let made = [Tensor::zeros(rt, [2], dtype), Tensor::ones(rt, [2], DType::F32)?.to_dtype(dtype)];
    Verdict::all(made.into_iter().map(|made| {
        let message = made.map_or_else(|e| e.to_string(), |_| "no error".into());
        Ok(Verdict::when(message.contains(dtype.name()) && message.contains("does not store"), || message))
    }))
}

fn numbers<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let zeros = Tensor::zeros(rt, [3, 2], dtype)?.to_f64s()?;
    let ones = Tensor::ones(rt, [5], dtype)?.to_f64s()?;
    let mut verdict = Verdict::when(zeros == [0.0; 6] && ones == [1.0; 5], || format!("{zeros:?} {ones:?}"));
    if dtype == DType::Bool {
        return Ok(verdict);
    }
    let full = Tensor::full(rt, [], dtype, 7i64)?.to_f64s()?;
    if !computes(rt, dtype) {
        return Ok(verdict.and(Verdict::when(full == [7.0], || format!("{full:?}"))));
    }
    let range = Tensor::arange(rt, 3i64, 2i64, 5, dtype)?.to_f64s()?;
    let eye = Tensor::eye(rt, 3, dtype)?.to_f64s()?;
    verdict = verdict
        .and(Verdict::when(full == [7.0] && range == [3.0, 5.0, 7.0, 9.0, 11.0], || format!("{full:?} {range:?}")));
    Ok(verdict.and(Verdict::when(eye == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], || format!("{eye:?}"))))
}

/// The random word of an element.
fn word(seed: u64, stream: u32, i: usize) -> u32 {
    let block = (i / 4) as u64;
    let counter = [block as u32, (block >> 32) as u32, stream, 0];
    philox4x32_10(counter, [seed as u32, (seed >> 32) as u32])[i % 4]
}

fn uniform<R: Runtime>(rt: &R) -> Result<Verdict> {
    const SEED: u64 = 0x1234_5678_9abc_def0;
    let got = Tensor::uniform(rt, [1003], DType::F32, 0.0, 1.0, SEED)?.to_vec::<f32>()?;
    let wrong = got.iter().enumerate().position(|(i, &g)| g != (word(SEED, 0, i) >> 8) as f32 * 2f32.powi(-24));
    Ok(Verdict::when(wrong.is_none(), || format!("element {wrong:?}")))
}

fn bernoulli<R: Runtime>(rt: &R) -> Result<Verdict> {
    let got = Tensor::bernoulli(rt, [1003], 0.3, 5)?.to_vec::<bool>()?;
    let wrong = got.iter().enumerate().position(|(i, &g)| g != ((word(5, 0, i) >> 8) as f32 * 2f32.powi(-24) < 0.3f32));
    Ok(Verdict::when(wrong.is_none(), || format!("element {wrong:?}")))
}

fn drawn<R: Runtime>(rt: &R) -> Result<Verdict> {
    let mut rng = Philox::new(9, 0);
    let want: Vec<f32> = (0..57).map(|_| (1.0 + 2.0 * rng.normal()) as f32).collect();
    let normal = Tensor::normal(rt, [57], DType::F32, 1.0, 2.0, 9)?.to_vec::<f32>()?;
    let order: Vec<i64> = Philox::new(9, 0).permutation(57).into_iter().map(|i| i as i64).collect();
    let permutation = Tensor::permutation(rt, 57, 9)?.to_vec::<i64>()?;
    Ok(Verdict::when(normal == want && permutation == order, || "other numbers than the host's"))
}

/// Checks dropout: by the words of the seed, elements are kept and scaled, or are 0; about the requested fraction.
fn dropout<R: Runtime>(rt: &R) -> Result<Verdict> {
    use numcore::fused::NnOps;
    let (n, p, seed) = (10_007, 0.25, 42);
    let got = Tensor::ones(rt, [n], DType::F32)?.dropout(p, seed)?.to_vec::<f32>()?;
    let kept = |i: usize| p as f32 <= (word(seed, 0, i) >> 8) as f32 * 2f32.powi(-24);
    let wrong = (0..n).position(|i| got[i] != if kept(i) { 1.0 / 0.75 } else { 0.0 });
    let share = got.iter().filter(|&&g| g == 0.0).count() as f64 / n as f64;
    Ok(Verdict::when(wrong.is_none() && (share - p).abs() < 0.02, || format!("element {wrong:?}, share {share}")))
}
