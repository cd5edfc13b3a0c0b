//! Floating point. Without a rounding in its name, an operation rounds to nearest.

use super::{
    rounding::{down, maximum, minimum, toward_zero, up},
    rows,
};

rows! {
    "add" [f32 f64] (a: T, b: T) -> T => a + b;
    "add.rn" [f32 f64] (a: T, b: T) -> T => a + b;
    "add.rz" [f32] (a: f32, b: f32) -> f32 => toward_zero(a, 1.0, b);
    "sub" [f32 f64] (a: T, b: T) -> T => a - b;
    "sub.rn" [f32 f64] (a: T, b: T) -> T => a - b;
    "mul" [f32 f64] (a: T, b: T) -> T => a * b;
    "mul.rn" [f32 f64] (a: T, b: T) -> T => a * b;
    "fma.rn" [f32 f64] (a: T, b: T, c: T) -> T => a.mul_add(b, c);
    "fma.rm" [f32] (a: f32, b: f32, c: f32) -> f32 => down(a, b, c);
    "fma.rp" [f32] (a: f32, b: f32, c: f32) -> f32 => up(a, b, c);
    "fma.rz" [f32] (a: f32, b: f32, c: f32) -> f32 => toward_zero(a, b, c);
    "div.rn" [f32 f64] (a: T, b: T) -> T => a / b;
    "rcp.rn" [f32 f64] (a: T) -> T => 1.0 / a;
    "sqrt.rn" [f32 f64] (a: T) -> T => a.sqrt();
    "neg" [f32 f64] (a: T) -> T => -a;
    "abs" [f32 f64] (a: T) -> T => a.abs();
    "copysign" [f32 f64] (sign: T, a: T) -> T => a.copysign(sign);
    "min" [f32 f64] (a: T, b: T) -> T => minimum(a, b);
    "max" [f32 f64] (a: T, b: T) -> T => maximum(a, b);
    // Approximations: the nearest value instead, and zero for subnormal results where these are flushed.
    "ex2.approx.ftz" [f32] (a: f32) -> f32 => flushed(flushed(a).exp2());
    "ex2.approx" [f32] (a: f32) -> f32 => a.exp2();
    "lg2.approx.ftz" [f32] (a: f32) -> f32 => flushed(a).log2();
    "lg2.approx" [f32] (a: f32) -> f32 => a.log2();
    "rcp.approx.ftz" [f32] (a: f32) -> f32 => flushed(1.0 / flushed(a));
    "rcp.approx" [f32] (a: f32) -> f32 => 1.0 / a;
    "sqrt.approx" [f32] (a: f32) -> f32 => a.sqrt();
    "rsqrt.approx.ftz" [f32] (a: f32) -> f32 => flushed(1.0 / flushed(a).sqrt());
    "rsqrt.approx" [f32] (a: f32) -> f32 => (1.0 / f64::from(a).sqrt()) as f32;
    "rsqrt.approx" [f64] (a: f64) -> f64 => 1.0 / a.sqrt();
    "rsqrt.approx.ftz" [f64] (a: f64) -> f64 => high_word(1.0 / flushed64(a).sqrt());
    "div.approx.ftz" [f32] (a: f32, b: f32) -> f32 => flushed(flushed(a) / flushed(b));
    "div.approx" [f32] (a: f32, b: f32) -> f32 => a / b;
    "sin.approx" [f32] (a: f32) -> f32 => a.sin();
    "cos.approx" [f32] (a: f32) -> f32 => a.cos();
    "tanh.approx" [f32] (a: f32) -> f32 => a.tanh();
    // A seed of Newton's method: the upper word alone.
    "rcp.approx.ftz" [f64] (a: f64) -> f64 => high_word(1.0 / flushed64(a));
}

/// Zero, with its sign, in place of a subnormal value.
fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0f32.copysign(value) } else { value }
}

fn flushed64(value: f64) -> f64 {
    if value.is_subnormal() { 0f64.copysign(value) } else { value }
}

/// The value with the lower half of its bits cleared.
fn high_word(value: f64) -> f64 {
    f64::from_bits(flushed64(value).to_bits() & !0xffff_ffff)
}
