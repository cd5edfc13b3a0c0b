//! The operations that the element functions require of a floating type: arithmetic, its bits, and constants in two
//! parts.
//!
//! Every operation here is branch-free and becomes one or two vector instructions inside a loop. `as` casts between
//! floats and integers are absent on purpose: they saturate, which prevents vectorization. [`Real::ROUNDER`] rounds to
//! an integer instead and leaves that integer in the low bits.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// A floating type as its bits and exact constants. The pair `X`, `X_LO` is the value `X` to twice the precision.
pub(crate) trait Real:
    Copy
    + PartialOrd
    + Neg<Output = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// The constant 0.
    const ZERO: Self;
    /// The constant 1.
    const ONE: Self;
    /// The constant 2.
    const TWO: Self;
    /// The constant 1/2.
    const HALF: Self;
    /// The constant 1/4.
    const QUARTER: Self;
    /// Positive infinity.
    const INF: Self;
    /// A quiet NaN.
    const NAN: Self;
    /// The smallest positive normal value.
    const MIN_NORMAL: Self;
    /// A factor that makes every subnormal value normal.
    const LIFT: Self;
    /// The binary logarithm of [`LIFT`](Self::LIFT).
    const LIFT_BITS: Self;
    /// The largest value that stays finite when multiplied by [`LIFT`](Self::LIFT).
    const LARGE: Self;
    /// Below this magnitude `x + x²` rounds to `x`.
    const TINY: Self;
    /// The bias of the exponent.
    const BIAS: Self;
    /// The constant `1.5·2^p` for `p` bits of fraction: `x + ROUNDER` holds `x` rounded to an integer (ties to even) in
    /// its low bits.
    const ROUNDER: Self;
    /// The constant ln 2, rounded.
    const LN2: Self;
    /// The remainder ln 2 − `LN2`.
    const LN2_LO: Self;
    /// The constant log₂ e, rounded.
    const LOG2E: Self;
    /// The remainder log₂ e − `LOG2E`.
    const LOG2E_LO: Self;
    /// The constant π/2, rounded.
    const PIO2: Self;
    /// The remainder π/2 − `PIO2`.
    const PIO2_LO: Self;

    /// The sum `self · a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// The magnitude of `self` with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// The square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// The largest integer that is not above `self`.
    fn floor(self) -> Self;
    /// The smallest integer that is not below `self`.
    fn ceil(self) -> Self;
    /// The integer part, by rounding towards zero.
    fn trunc(self) -> Self;
    /// The nearest integer; of two, the even one.
    fn round_ties_even(self) -> Self;
    /// The remainder of truncated division, exact: C's `fmod`. Scalar code.
    fn fmod(self, divisor: Self) -> Self;
    /// Tells whether it is NaN.
    fn is_nan(self) -> bool;
    /// Tells whether the sign bit is set.
    fn sign_bit(self) -> bool;
    /// Bit `k` of the representation: of the integer, if `self` is an integer plus [`Real::ROUNDER`].
    fn bit(self, k: u32) -> bool;
    /// The power `2ⁿ` of `ROUNDER + BIAS + n`, for a normal `2ⁿ`.
    fn power(self) -> Self;
    /// The two factors of `2ⁿ` of `ROUNDER + 2·BIAS + n`, each normal where `2ⁿ` overflows or is subnormal.
    fn power_halves(self) -> (Self, Self);
    /// The parts `(e, m − 1)` with `self = 2ᵉ·m`, `m` in `[2/3, 4/3)` for `f32`, `[√½, √2)` for `f64`; for a positive
    /// value.
    fn split(self) -> (Self, Self);
}

/// Implements trait methods by the float's own methods of the same name.
macro_rules! inherent {
    ($($name:ident($($arg:ident),*))*) => {$(
        #[inline(always)]
        fn $name(self $(, $arg: Self)*) -> Self {
            Self::$name(self $(, $arg)*)
        }
    )*};
}

macro_rules! real {
    ($float:ident, $bits:ident, fraction: $fraction:literal, bias: $bias:literal, mantissa_from: $from:expr,
     lift: $lift:literal = 2^$lift_bits:literal, large: $large:literal, tiny: $tiny:literal,
     low_parts: [$ln2_lo:literal, $log2e_lo:literal, $pio2_lo:literal]) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const TWO: Self = 2.0;
            const HALF: Self = 0.5;
            const QUARTER: Self = 0.25;
            const INF: Self = $float::INFINITY;
            const NAN: Self = $float::NAN;
            const MIN_NORMAL: Self = $float::MIN_POSITIVE;
            const LIFT: Self = $lift;
            const LIFT_BITS: Self = $lift_bits;
            const LARGE: Self = $large;
            const TINY: Self = $tiny;
            const BIAS: Self = $bias;
            const ROUNDER: Self = 1.5 * (1u64 << $fraction) as $float;
            const LN2: Self = std::$float::consts::LN_2;
            const LN2_LO: Self = $ln2_lo;
            const LOG2E: Self = std::$float::consts::LOG2_E;
            const LOG2E_LO: Self = $log2e_lo;
            const PIO2: Self = std::$float::consts::FRAC_PI_2;
            const PIO2_LO: Self = $pio2_lo;

            inherent!(mul_add(a, b) abs() copysign(sign) sqrt() floor() ceil() trunc() round_ties_even());

            #[inline(always)]
            fn fmod(self, divisor: Self) -> Self {
                self % divisor
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                $float::is_nan(self)
            }
            #[inline(always)]
            fn sign_bit(self) -> bool {
                self.is_sign_negative()
            }
            #[inline(always)]
            fn bit(self, k: u32) -> bool {
                self.to_bits() & (1 << k) != 0
            }
            #[inline(always)]
            fn power(self) -> Self {
                $float::from_bits(self.to_bits() << $fraction)
            }
            #[inline(always)]
            fn power_halves(self) -> (Self, Self) {
                let bits = self.to_bits();
                let half = bits >> 1;
                let rest = bits.wrapping_sub(half);
                (
                    $float::from_bits(half << $fraction),
                    $float::from_bits(rest << $fraction),
                )
            }
            #[inline(always)]
            fn split(self) -> (Self, Self) {
                const SCALE: $float = (1u64 << $fraction) as $float;
                const FROM: $bits = ($from as $float).to_bits();
                const SHIFT: $bits = (1.0 as $float).to_bits() - FROM;
                let subnormal = self < Self::MIN_NORMAL;
                let x = if subnormal { self * SCALE } else { self };
                let offset = if subnormal {
                    Self::ROUNDER + Self::BIAS + $fraction as $float
                } else {
                    Self::ROUNDER + Self::BIAS
                };
                let shifted = x.to_bits().wrapping_add(SHIFT);
                let e = $float::from_bits((shifted >> $fraction) | Self::ROUNDER.to_bits()) - offset;
                let m = (shifted & ((1 << $fraction) - 1)).wrapping_add(FROM);
                (e, $float::from_bits(m) - 1.0)
            }
        }
    };
}

real!(f32, u32, fraction: 23, bias: 127.0, mantissa_from: 0.666_666_7,
    lift: 268_435_456.0 = 2^28.0, large: 1e29, tiny: 1e-9,
    low_parts: [-1.904_654_2e-9, 1.925_963e-8, -4.371_139e-8]);
real!(f64, u64, fraction: 52, bias: 1023.0, mantissa_from: std::f64::consts::FRAC_1_SQRT_2,
    lift: 36_028_797_018_963_968.0 = 2^55.0, large: 1e290, tiny: 1e-17,
    low_parts: [2.319_046_813_846_299_6e-17, 2.035_527_374_093_103_3e-17, 6.123_233_995_736_766e-17]);

/// The polynomial `c[0] + c[1]·x + …`: even and odd powers separately, each by Horner's rule with FMAs.
#[inline(always)]
pub(super) fn polynomial<T: Real, const N: usize>(x: T, c: [T; N]) -> T {
    let z = x * x;
    every_second(z, &c, 1).mul_add(x, every_second(z, &c, 0))
}

/// The polynomial by Horner's rule over all coefficients, in which each FMA waits for the one before. It takes a
/// multiplication less than [`polynomial`], which pays where many elements are computed at once.
#[inline(always)]
pub(super) fn one_by_one<T: Real, const N: usize>(x: T, c: [T; N]) -> T {
    c[..N - 1].iter().rev().fold(c[N - 1], |sum, &c| sum.mul_add(x, c))
}

/// Computes `c[first] + c[first + 2]·z + c[first + 4]·z² + …`
#[inline(always)]
fn every_second<T: Real, const N: usize>(z: T, c: &[T; N], first: usize) -> T {
    let mut k = (N - 1 - first) / 2 * 2 + first;
    let mut sum = c[k];
    while k > first {
        k -= 2;
        sum = sum.mul_add(z, c[k]);
    }
    sum
}

/// Clamps `x` to `[low, high]`; NaN stays.
#[inline(always)]
pub(super) fn clamp<T: Real>(x: T, low: T, high: T) -> T {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}
