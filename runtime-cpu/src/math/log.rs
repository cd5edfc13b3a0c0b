//! Logarithms: `log`, `log2`, `log1p`, and a logarithm to twice the precision for `pow`.
//!
//! `x = 2ᵉ·(1 + f)` with `1 + f` near 1, so that `log x = e·ln 2 + f + tail(f)`.

use super::real::{Real, polynomial};

/// The series of one type.
pub(crate) trait Log: Real {
    /// The polynomial `log(1 + f) − f` for the `f` of [`Real::split`].
    fn log_tail(f: Self) -> Self;
}

impl Log for f32 {
    // Minimax for |f| ≤ 1/3 by Remez' exchange, made for this crate: 2^-26.8.
    #[inline(always)]
    fn log_tail(f: f32) -> f32 {
        let q = polynomial(
            f,
            [-0.5, 0.33333215, -0.24999811, 0.2001045, -0.1668191, 0.14003249, -0.12151401, 0.1400822, -0.1305949],
        );
        f * f * q
    }
}

impl Log for f64 {
    // log(1 + f) = 2·artanh(s), s = f/(2 + f), summed in the order of fdlibm's e_log.c (Sun Microsystems, 1993).
    // The polynomial is a minimax fit by Remez' exchange, made for this crate: 2^-59.5.
    #[inline(always)]
    fn log_tail(f: f64) -> f64 {
        let s = f / (2.0 + f);
        let z = s * s;
        let p = polynomial(
            z,
            [
                0.6666666666666735,
                0.39999999999408997,
                0.2857142874383284,
                0.22222198407737237,
                0.18183573757478316,
                0.15313789127559382,
                0.14798757000102664,
            ],
        );
        let half_square = 0.5 * f * f;
        s.mul_add(z.mul_add(p, half_square), -half_square)
    }
}

#[inline(always)]
pub(super) fn log<T: Log>(x: T) -> T {
    let (e, f) = x.split();
    at_the_ends(x, e.mul_add(T::LN2, f + e.mul_add(T::LN2_LO, T::log_tail(f))))
}

#[inline(always)]
pub(super) fn log2<T: Log>(x: T) -> T {
    at_the_ends(x, log2_positive(x))
}

/// Computes `log2(x)` for a positive finite `x`.
#[inline(always)]
pub(super) fn log2_positive<T: Log>(x: T) -> T {
    let (e, f) = x.split();
    let low = T::log_tail(f).mul_add(T::LOG2E, f * T::LOG2E_LO);
    e + f.mul_add(T::LOG2E, low)
}

/// The value `y`, or the value of a logarithm at infinity, NaN, zero and below.
#[inline(always)]
fn at_the_ends<T: Real>(x: T, y: T) -> T {
    let y = if x < T::INF { y } else { x };
    let outside = if x < T::ZERO { T::NAN } else { -T::INF };
    if x <= T::ZERO { outside } else { y }
}

/// Computes `log(1 + x)`, from the split of the rounded `u = 1 + x`, with the rounding error added to `f`.
#[inline(always)]
pub(super) fn log1p<T: Log>(x: T) -> T {
    let u = T::ONE + x;
    let lost = x - (u - T::ONE);
    let (e, f) = u.split();
    // Where 2^-e is subnormal it comes out as 0, and `lost` is far below the last place.
    let e_or_bias = if e < T::BIAS { e } else { T::BIAS };
    let f = lost.mul_add((T::ROUNDER + (T::BIAS - e_or_bias)).power(), f);
    let y = e.mul_add(T::LN2, f + e.mul_add(T::LN2_LO, T::log_tail(f)));
    let y = at_the_ends(u, y);
    // Keeps the sign of zero, infinity (whose `lost` is NaN) and NaN.
    if x == T::ZERO || u == T::INF { x } else { y }
}

/// Computes `log(x)` as an unevaluated sum, good to about 2^-64, for a positive finite `x`.
///
/// `log x = e·ln 2 + 2s + (2/3)s³ + s⁵·T(s²)`, the first three terms in pairs.
#[inline(always)]
pub(super) fn log_pair(x: f64) -> (f64, f64) {
    let (e, f) = x.split();
    let s = Pair::quotient(f, 2.0 + f, f - ((2.0 + f) - 2.0));
    let z = s.times(s);
    let cube = s.times(z);
    // Minimax for |s| ≤ 3 − 2√2 by Remez' exchange, made for this crate: 2^-66.3 of the logarithm.
    let t = polynomial(
        z.0,
        [
            0.40000000000002284,
            0.285714285700853,
            0.22222222522636098,
            0.18181784116391128,
            0.15386769449070217,
            0.13256523291067387,
            0.1319916789349268,
        ],
    );
    let third = cube.times(Pair(0.6666666666666666, 3.700743415417188e-17));
    let ln2 = Pair(f64::LN2, f64::LN2_LO).scaled(e);
    let sum = ln2.plus(Pair(2.0 * s.0, 2.0 * s.1)).plus(third);
    let sum = sum.plus(Pair(cube.0 * z.0 * t, 0.0));
    (sum.0, sum.1)
}

/// A value as an unevaluated sum of high and low part (Dekker, *A Floating-Point Technique for Extending the Available
/// Precision*, 1971).
#[derive(Clone, Copy)]
struct Pair(f64, f64);

impl Pair {
    /// Computes `a / (b + b_low)`.
    #[inline(always)]
    fn quotient(a: f64, b: f64, b_low: f64) -> Pair {
        let inverse = 1.0 / b;
        let q = a * inverse;
        let rest = (-q).mul_add(b_low, (-q).mul_add(b, a));
        Pair(q, rest * inverse)
    }

    #[inline(always)]
    fn times(self, b: Pair) -> Pair {
        let high = self.0 * b.0;
        let low = self.0.mul_add(b.0, -high);
        Pair(high, self.1.mul_add(b.0, self.0.mul_add(b.1, low)))
    }

    #[inline(always)]
    fn scaled(self, k: f64) -> Pair {
        let high = self.0 * k;
        Pair(high, self.1.mul_add(k, self.0.mul_add(k, -high)))
    }

    /// The sum where `self` is the larger, or zero.
    #[inline(always)]
    fn plus(self, b: Pair) -> Pair {
        let high = self.0 + b.0;
        Pair(high, ((self.0 - high) + b.0) + (self.1 + b.1))
    }
}
