//! The exponential and the functions computed from it: `exp`, `exp2`, `expm1`, `sinh`, `cosh`, `tanh`.
//!
//! `x = n·ln 2 + r` with `|r| ≤ ln 2 / 2` (Cody and Waite, *Software Manual for the Elementary Functions*, 1980, with
//! FMAs), then a polynomial in `r` and the factor `2ⁿ` from the exponent's bits. The polynomials are minimax fits by
//! the Remez exchange algorithm, computed for this crate; each states its largest relative error.

use super::real::{Real, clamp, polynomial};

/// Polynomials and ranges of the exponential of one type.
pub(crate) trait Exp: Real {
    /// The bounds below which `exp` is 0, and above which it is infinity.
    const EXP_RANGE: (Self, Self);
    /// The range of finite, normal results of `exp2`.
    const EXP2_RANGE: (Self, Self);
    /// The constant ln 2 in two parts, of which the first ends in zeros: its products with exponents are exact.
    const LN2_PARTS: (Self, Self);
    /// The value below which `expm1` is −1.
    const EXPM1_LOW: Self;
    /// The magnitude above which `sinh` and `cosh` are infinite.
    const SINH_HIGH: Self;
    /// The polynomial `(eʳ − 1 − r) / r²` where `eʳ` is wanted.
    fn exp_tail(r: Self) -> Self;
    /// The polynomial `(eʳ − 1 − r) / r²` where `eʳ − 1` is wanted.
    fn expm1_tail(r: Self) -> Self;
    /// The polynomial `(2ʳ − 1) / r`, `|r| ≤ 1/2`.
    fn exp2_slope(r: Self) -> Self;
}

/// The coefficients of [`Exp::exp2_slope`] for `f32`.
pub(crate) const EXP2_SLOPE: [f32; 6] = [f32::LN2, 0.2402265, 0.055503633, 0.0096179675, 0.0013389124, 0.00015498482];

impl Exp for f32 {
    const EXP_RANGE: (f32, f32) = (-104.0, 89.0);
    const EXP2_RANGE: (f32, f32) = (-151.0, 129.0);
    const LN2_PARTS: (f32, f32) = (0.693_145_75, 1.428_606_8e-6);
    const EXPM1_LOW: f32 = -20.0;
    const SINH_HIGH: f32 = 89.5;

    // 2^-27.4
    #[inline(always)]
    fn exp_tail(r: f32) -> f32 {
        polynomial(r, [0.49999994, 0.16666517, 0.041668106, 0.00836993, 0.0013841616])
    }
    // 2^-30.3
    #[inline(always)]
    fn expm1_tail(r: f32) -> f32 {
        polynomial(r, [0.5, 0.16666666, 0.041666497, 0.0083335275, 0.0013932916, 0.0001978181])
    }
    // 2^-27.4
    #[inline(always)]
    fn exp2_slope(r: f32) -> f32 {
        polynomial(r, EXP2_SLOPE)
    }
}

impl Exp for f64 {
    const EXP_RANGE: (f64, f64) = (-746.0, 710.0);
    const EXP2_RANGE: (f64, f64) = (-1076.0, 1025.0);
    const LN2_PARTS: (f64, f64) = (0.6931471803691238, 1.9082149292705877e-10);
    const EXPM1_LOW: f64 = -45.0;
    const SINH_HIGH: f64 = 710.5;

    #[inline(always)]
    fn exp_tail(r: f64) -> f64 {
        Self::expm1_tail(r)
    }
    // 2^-60.2
    #[inline(always)]
    fn expm1_tail(r: f64) -> f64 {
        polynomial(
            r,
            [
                0.5,
                0.16666666666666677,
                0.041666666666666685,
                0.008333333333321796,
                0.0013888888888896477,
                0.00019841269885605495,
                2.480158723341907e-05,
                2.7557244667244687e-06,
                2.755741171070033e-07,
                2.5108917674963826e-08,
                2.0855540801245338e-09,
            ],
        )
    }
    // 2^-57.4
    #[inline(always)]
    fn exp2_slope(r: f64) -> f64 {
        polynomial(
            r,
            [
                f64::LN2,
                0.2402265069591011,
                0.055504108664821784,
                0.009618129107600383,
                0.0013333558146519252,
                0.00015403530450795508,
                1.5252733671262566e-05,
                1.3215437809155932e-06,
                1.0178139234211282e-07,
                7.073438319962883e-09,
                4.442867039410916e-10,
            ],
        )
    }
}

/// Computes `(t, r)`: `x = n·ln 2 + r`, and `t = n + shift` for a shift with [`Real::ROUNDER`] in it.
#[inline(always)]
fn reduce<T: Exp>(x: T, shift: T) -> (T, T) {
    let t = x.mul_add(T::LOG2E, shift);
    let n = t - shift;
    // The first step is exact: n·LN2 and x are multiples of one unit, and their difference is small.
    let r = n.mul_add(-T::LN2, x);
    (t, n.mul_add(-T::LN2_LO, r))
}

/// Computes `eʳ`, `|r| ≤ ln 2 / 2`.
#[inline(always)]
fn exp_reduced<T: Exp>(r: T) -> T {
    (r * r).mul_add(T::exp_tail(r), r) + T::ONE
}

#[inline(always)]
pub(super) fn exp<T: Exp>(x: T) -> T {
    exp_corrected(x, |r| r)
}

/// Computes `exp(x)` for `x ≤ 0`, bit for bit: there `2ⁿ` is one factor and a constant, in a third of the operations.
#[inline(always)]
pub(super) fn exp_negative<T: Exp>(x: T) -> T {
    let x = if x < T::EXP_RANGE.0 { T::EXP_RANGE.0 } else { x };
    let (t, r) = reduce(x, T::ROUNDER + T::BIAS + T::LIFT_BITS);
    exp_reduced(r) * t.power() * (T::ONE / T::LIFT)
}

/// Computes `exp(−a²)·factor` for `a ≥ 0` up to where it is 0. An FMA subtracts `n·ln 2` from `a²` before it is
/// rounded.
#[inline(always)]
pub(super) fn exp_minus_square<T: Exp>(a: T, factor: T) -> T {
    let shift = T::ROUNDER + T::BIAS + T::LIFT_BITS;
    let t = (a * -T::LOG2E).mul_add(a, shift);
    let n = t - shift;
    let (high, low) = T::LN2_PARTS;
    let r = (-a).mul_add(a, -(n * high));
    exp_reduced(n.mul_add(-low, r)) * t.power() * factor * (T::ONE / T::LIFT)
}

/// Computes `exp(x + low)` for a `low` below the last place of `x`.
#[inline(always)]
pub(super) fn exp_sum<T: Exp>(x: T, low: T) -> T {
    exp_corrected(x, |r| r + low)
}

#[inline(always)]
fn exp_corrected<T: Exp>(x: T, correct: impl Fn(T) -> T) -> T {
    let x = clamp(x, T::EXP_RANGE.0, T::EXP_RANGE.1);
    let (t, r) = reduce(x, T::ROUNDER + T::TWO * T::BIAS);
    scaled(exp_reduced(correct(r)), t)
}

/// Computes `y·2ⁿ` of `t = ROUNDER + 2·BIAS + n`, rounded once.
#[inline(always)]
fn scaled<T: Real>(y: T, t: T) -> T {
    let (a, b) = t.power_halves();
    y * a * b
}

#[inline(always)]
pub(super) fn exp2<T: Exp>(x: T) -> T {
    let x = clamp(x, T::EXP2_RANGE.0, T::EXP2_RANGE.1);
    let shift = T::ROUNDER + T::TWO * T::BIAS;
    let t = x + shift;
    scaled(exp2_reduced(x - (t - shift)), t)
}

/// Computes `2ˣ` where the result is a normal value.
#[inline(always)]
pub(super) fn exp2_normal<T: Exp>(x: T) -> T {
    let shift = T::ROUNDER + T::BIAS;
    let t = x + shift;
    exp2_reduced(x - (t - shift)) * t.power()
}

/// Computes `2ˣ`; 0 where the result is not a normal value. `x` is at most where it overflows.
#[inline(always)]
pub(super) fn exp2_flushed<T: Exp>(x: T) -> T {
    let y = exp2_normal(x);
    if x < T::ONE - T::BIAS { T::ZERO } else { y }
}

#[inline(always)]
fn exp2_reduced<T: Exp>(r: T) -> T {
    r.mul_add(T::exp2_slope(r), T::ONE)
}

/// Computes `(eˣ − 1)·unit` for `unit = 2^-k`, where the result is finite and `x` is above [`Exp::EXPM1_LOW`].
///
/// The scale keeps `2ⁿ` finite where the caller's own factor of `2^k` may overflow.
#[inline(always)]
fn expm1_scaled<T: Exp>(x: T, k: T, unit: T) -> T {
    let (t, r) = reduce(x, T::ROUNDER + T::BIAS - k);
    let s = t.power();
    // s·(r + r²·tail) + (s − unit), in an order that rounds the large part once.
    let large = s.mul_add(r, s - unit);
    (s * (r * r)).mul_add(T::expm1_tail(r), large)
}

#[inline(always)]
pub(super) fn expm1<T: Exp>(x: T) -> T {
    let y = clamp(x, T::EXPM1_LOW, T::EXP_RANGE.1);
    let y = T::TWO * expm1_scaled(y, T::ONE, T::HALF);
    if x.abs() < T::TINY { x } else { y }
}

/// Computes `expm1(x)` for `x ≤ 0`; −0 gives +0.
#[inline(always)]
pub(super) fn expm1_negative<T: Exp>(x: T) -> T {
    expm1_above_low(if x < T::EXPM1_LOW { T::EXPM1_LOW } else { x })
}

/// Computes `expm1(x)` where `x` is above [`Exp::EXPM1_LOW`]. `2ⁿ` is at most 1 here, so `n·ln 2` needs no digits
/// beyond the last place of `ln 2`.
#[inline(always)]
pub(super) fn expm1_above_low<T: Exp>(x: T) -> T {
    let shift = T::ROUNDER + T::BIAS;
    let t = x.mul_add(T::LOG2E, shift);
    let r = (t - shift).mul_add(-T::LN2, x);
    let s = t.power();
    let large = s.mul_add(r, s - T::ONE);
    (s * (r * r)).mul_add(T::expm1_tail(r), large)
}

/// Computes `t / (2 + t)` with `t = expm1(−2|x|)`, of opposite sign: no cancellation for any `x`.
#[inline(always)]
pub(super) fn tanh<T: Exp>(x: T) -> T {
    let t = expm1_negative(-T::TWO * x.abs());
    (t / (T::TWO + t)).copysign(x)
}

/// Computes `(t + t/(t+1)) / 2` with `t = expm1(|x|)`.
#[inline(always)]
pub(super) fn sinh<T: Exp>(x: T) -> T {
    let a = clamp(x.abs(), T::ZERO, T::SINH_HIGH);
    let q = expm1_scaled(a, T::TWO, T::QUARTER);
    let t = q / q.mul_add(T::TWO + T::TWO, T::ONE);
    let y = (T::TWO * (q + t)).copysign(x);
    if x.abs() < T::TINY { x } else { y }
}

#[inline(always)]
pub(super) fn cosh<T: Exp>(x: T) -> T {
    let a = clamp(x.abs(), T::ZERO, T::SINH_HIGH);
    let (t, r) = reduce(a, T::ROUNDER + T::BIAS - T::TWO);
    let quarter = exp_reduced(r) * t.power();
    T::TWO.mul_add(quarter, T::HALF * T::QUARTER / quarter)
}
