//! The power function `pow`, with C's special values.

use super::exp::{exp_sum, exp2_normal};
use super::log::{log_pair, log2_positive};
use super::real::{Real, clamp};

/// The magnitude of one type's power.
pub(crate) trait Pow: Real {
    /// Computes `aʸ` for a positive finite `a`.
    fn positive_pow(a: Self, y: Self) -> Self;
}

impl Pow for f32 {
    /// The power in `f64`, where a plain logarithm is precise enough and nothing that fits `f32` is subnormal.
    #[inline(always)]
    fn positive_pow(a: f32, y: f32) -> f32 {
        let y = clamp(f64::from(y), -1e18, 1e18);
        exp2_normal(clamp(y * log2_positive(f64::from(a)), -200.0, 200.0)) as f32
    }
}

impl Pow for f64 {
    /// The product with the logarithm's pair is kept as a double-double pair: its error is multiplied by up to 745.
    #[inline(always)]
    fn positive_pow(a: f64, y: f64) -> f64 {
        let y = clamp(y, -1e20, 1e20);
        let (high, low) = log_pair(a);
        let p = y * high;
        let p_low = y.mul_add(low, y.mul_add(high, -p));
        exp_sum(p, if p.abs() < 800.0 { p_low } else { 0.0 })
    }
}

#[inline(always)]
pub(super) fn pow<T: Pow>(x: T, y: T) -> T {
    let a = x.abs();
    let grows = (a == T::ZERO) == (y < T::ZERO);
    let end = if grows { T::INF } else { T::ZERO };
    let size = if a == T::ZERO || a == T::INF { end } else { T::positive_pow(a, y) };
    let half = y * T::HALF;
    let whole = y.trunc() == y;
    let odd = whole && half.trunc() != half;
    let signed = if x.sign_bit() && odd { -size } else { size };
    let real = if x < T::ZERO && a < T::INF && !whole { T::NAN } else { signed };
    let unordered = x.is_nan() || y.is_nan();
    let known = if unordered { x + y } else { real };
    if y == T::ZERO || x == T::ONE { T::ONE } else { known }
}
