//! The inverse trigonometric functions: `asin`, `acos`, `atan`, `atan2`.
//!
//! The polynomials are minimax fits by the Remez exchange algorithm, computed for this crate; each states its largest
//! relative error.

use super::real::{Real, polynomial};

/// The series of one type.
pub(crate) trait Arc: Real {
    /// The polynomial `(asin(s)/s − 1) / z` of `z = s² ≤ 1/4`.
    fn asin_tail(z: Self) -> Self;
    /// The polynomial `(atan(t)/t − 1) / z` of `z = t² ≤ tan²(π/8)`.
    fn atan_tail(z: Self) -> Self;
    /// The values tan(3π/8) and tan(π/8), roughly.
    const EIGHTHS: (Self, Self);
}

impl Arc for f32 {
    const EIGHTHS: (f32, f32) = (2.414_213_7, 0.414_213_57);

    // 2^-27.6
    #[inline(always)]
    fn asin_tail(z: f32) -> f32 {
        polynomial(z, [0.16666752, 0.07495309, 0.045469318, 0.024183648, 0.04216067])
    }
    // 2^-30.4
    #[inline(always)]
    fn atan_tail(z: f32) -> f32 {
        polynomial(z, [-0.33333316, 0.19998528, -0.1424439, 0.105991445, -0.0608996])
    }
}

impl Arc for f64 {
    const EIGHTHS: (f64, f64) = (2.414_213_562_373_095, 0.414_213_562_373_095_03);

    // 2^-59.9
    #[inline(always)]
    fn asin_tail(z: f64) -> f64 {
        polynomial(
            z,
            [
                0.1666666666666676,
                0.07499999999970847,
                0.04464285717459066,
                0.03038194270806105,
                0.022372214994986685,
                0.01735161167015412,
                0.013980826735584016,
                0.011398847246337928,
                0.010780687041152558,
                0.003704533112643984,
                0.021712528084522793,
                -0.021006923198959457,
                0.032633927492253655,
            ],
        )
    }
    // 2^-59.4
    #[inline(always)]
    fn atan_tail(z: f64) -> f64 {
        polynomial(
            z,
            [
                -0.333333333333332,
                0.19999999999953647,
                -0.14285714280195505,
                0.1111111078324432,
                -0.09090897749383021,
                0.0769206005132444,
                -0.0666310215363527,
                0.05847875771387896,
                -0.0503924621919092,
                0.03806315863834258,
                -0.017905779081013637,
            ],
        )
    }
}

/// Computes `(s, rest)` with `asin(s) = s + rest`: `s = a` up to 1/2, and beyond `s = √((1 − a)/2)`, where `asin(a) =
/// π/2 − 2·asin(s)`.
#[inline(always)]
fn asin_parts<T: Arc>(a: T) -> (T, T) {
    let folded = (T::ONE - a) * T::HALF;
    let z = if a > T::HALF { folded } else { a * a };
    let s = if a > T::HALF { folded.sqrt() } else { a };
    (s, s * z * T::asin_tail(z))
}

#[inline(always)]
pub(super) fn asin<T: Arc>(x: T) -> T {
    let a = x.abs();
    let (s, rest) = asin_parts(a);
    let near_one = T::TWO.mul_add(-s, T::PIO2) + T::TWO.mul_add(-rest, T::PIO2_LO);
    let y = if a > T::HALF { near_one } else { s + rest };
    y.copysign(x)
}

#[inline(always)]
pub(super) fn acos<T: Arc>(x: T) -> T {
    let a = x.abs();
    let (s, rest) = asin_parts(a);
    let twice = T::TWO * (s + rest);
    let minus = x < T::ZERO;
    let near_one = if minus { pi_minus(twice) } else { twice };
    let (s, rest) = if minus { (-s, -rest) } else { (s, rest) };
    let near_zero = T::PIO2 - (s - (T::PIO2_LO - rest));
    if a > T::HALF { near_one } else { near_zero }
}

#[inline(always)]
fn pi_minus<T: Real>(y: T) -> T {
    (T::TWO * T::PIO2 - y) + T::TWO * T::PIO2_LO
}

/// Computes `atan(a/b)` of positive `a` and `b`: around 0, π/4 or π/2, whichever is nearest.
#[inline(always)]
fn atan_ratio<T: Arc>(a: T, b: T) -> T {
    let steep = a > T::EIGHTHS.0 * b;
    let flat = a <= T::EIGHTHS.1 * b;
    let (a, b, quarters) = if steep {
        (-b, a, T::TWO)
    } else if flat {
        (a, b, T::ZERO)
    } else {
        (a - b, a + b, T::ONE)
    };
    let t = a / b;
    let z = t * t;
    let rest = (t * z).mul_add(T::atan_tail(z), quarters * (T::HALF * T::PIO2_LO));
    quarters.mul_add(T::HALF * T::PIO2, t + rest)
}

#[inline(always)]
pub(super) fn atan<T: Arc>(x: T) -> T {
    atan_ratio(x.abs(), T::ONE).copysign(x)
}

/// The angle of the point `(x, y)`, with C's values for zeros and infinities.
#[inline(always)]
pub(super) fn atan2<T: Arc>(y: T, x: T) -> T {
    let (a, b) = (y.abs(), x.abs());
    // Huge sides must not overflow in a sum, tiny ones not be rounded in a comparison;
    // equal sides, which may be infinite or zero, are the ratio 1 or 0.
    let huge = a > T::LARGE || b > T::LARGE;
    let unit = if huge { T::QUARTER } else { T::LIFT };
    let same = a == b;
    let rise = if a == T::ZERO { T::ZERO } else { T::ONE };
    let a = if same { rise } else { a * unit };
    let b = if same { T::ONE } else { b * unit };
    let angle = atan_ratio(a, b);
    let angle = if x.sign_bit() { pi_minus(angle) } else { angle };
    angle.copysign(y)
}
