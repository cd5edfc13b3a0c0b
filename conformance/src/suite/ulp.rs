//! Accuracy of the elementwise functions in `f32`: samples over all magnitudes, each function within its bound.

use numcore::{
    Result, Runtime, Tensor,
    ops::PointwiseOps,
    pointwise::{Expr, Number, Program, Unary},
};

use super::report::{Section, Verdict};

/// A function and the largest error of its result, in `f32` ULP at the exact value.
struct Row {
    op: Unary,
    write: for<'b> fn(Expr<'b>) -> Expr<'b>,
    ulp: f64,
}

macro_rules! rows {
    ($($op:ident $method:ident $ulp:literal;)*) => {
        &[$(Row { op: Unary::$op, write: |x| x.$method(), ulp: $ulp },)*]
    };
}

/// Bounds of the functions. WebGPU and CUDA promise wider ones for some; a runtime within these is as accurate as a
/// good C library.
const ROWS: &[Row] = rows! {
    Abs abs 0.0;
    Sign sign 0.0;
    Floor floor 0.0;
    Ceil ceil 0.0;
    Round round 0.0;
    Trunc trunc 0.0;
    Sqrt sqrt 0.5;
    Recip recip 0.5;
    Rsqrt rsqrt 2.0;
    Exp exp 2.0;
    Exp2 exp2 2.0;
    Expm1 expm1 2.5;
    Log log 2.0;
    Log2 log2 2.0;
    Log1p log1p 2.5;
    Sin sin 2.0;
    Cos cos 2.0;
    Tan tan 3.5;
    Asin asin 3.0;
    Acos acos 3.0;
    Atan atan 3.0;
    Sinh sinh 3.0;
    Cosh cosh 3.0;
    Tanh tanh 4.0;
    Erf erf 3.0;
    Erfc erfc 8.0;
};

/// The distance of sampled bit patterns: a prime, so that all mantissas occur.
const STRIDE: usize = 4099;

pub(crate) fn ulps<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("exactness");
    let mut patterns: Vec<f32> = (0..=u32::MAX).step_by(STRIDE).map(f32::from_bits).collect();
    patterns.extend([
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
        88.7,
        -87.3,
    ]);
    // Around 1 and 0, where results cancel, the samples are denser.
    patterns.extend((0..1 << 16).map(|i| i as f32 / 32_768.0 - 1.0));
    for row in ROWS {
        section.check(row.op.name(), || check(rt, row, &patterns));
    }
    section
}

fn check<R: Runtime>(rt: &R, row: &Row, patterns: &[f32]) -> Result<Verdict> {
    let program = Program::build("ulp", 1, 0, |_, x, _| vec![(row.write)(x[0])]);
    let x = Tensor::from_slice(rt, [patterns.len()], patterns)?;
    let got = x.apply_program(&program, &[], &[])?.to_vec::<f32>()?;
    let mut worst = (0.0, 0);
    for (i, (&x, &g)) in patterns.iter().zip(&got).enumerate() {
        let want = row.op.eval(Number::Float(f64::from(x))).to_f64();
        let distance = distance(g, want);
        if distance > worst.0 {
            worst = (distance, i);
        }
    }
    let (distance, i) = worst;
    Ok(Verdict::when(distance <= row.ulp, || {
        let want = row.op.eval(Number::Float(f64::from(patterns[i]))).to_f64();
        format!(
            "{distance:.2} ULP at {:?} (bits {:#010x}): {:?}, exactly {want:?}; {} allowed",
            patterns[i],
            patterns[i].to_bits(),
            got[i],
            row.ulp
        )
    }))
}

/// The error in `f32` ULP at `want`. A runtime may keep a subnormal or flush it to 0.
fn distance(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if got == rounded || got.is_nan() && want.is_nan() {
        return 0.0;
    }
    let tiny = f64::from(f32::MIN_POSITIVE);
    if want.abs() < tiny && f64::from(got).abs() <= tiny {
        return 0.0;
    }
    if got.is_nan()
        || want.is_nan()
        || got.is_infinite() && rounded.is_finite() && want.abs() < 0.999 * f64::from(f32::MAX)
    {
        return f64::INFINITY;
    }
    if rounded.is_infinite() {
        return if got.is_finite() && got.abs() >= 0.999 * f32::MAX { 1.0 } else { f64::INFINITY };
    }
    let exponent = want.abs().max(tiny).log2().floor();
    (f64::from(got) - want).abs() / 2f64.powf(exponent - 23.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_function_is_left_out() {
        let missing: Vec<&str> =
            Unary::ALL.iter().filter(|op| !ROWS.iter().any(|r| r.op == **op)).map(|op| op.name()).collect();
        assert_eq!(missing, ["neg", "not"]);
    }

    #[test]
    fn distances() {
        assert_eq!(distance(1.0, 1.0), 0.0);
        assert!((distance(1.0, 1.0 + 2f64.powi(-23)) - 1.0).abs() < 1e-12);
        assert_eq!((distance(f32::NAN, 1.0), distance(1.0, f64::INFINITY)), (f64::INFINITY, f64::INFINITY));
        assert_eq!(distance(0.0, 1e-40), 0.0);
    }
}
