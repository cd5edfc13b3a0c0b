//! Fused multiply-adds in directions other than to nearest, and minima that prefer numbers to NaN.

/// The value `a * b + c` in `f64`, and the sign of what its rounding has lost.
fn sum(a: f32, b: f32, c: f32) -> (f64, f64) {
    // Exact: 48 bits.
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    // The error of a sum (Knuth, 1969).
    let part = sum - product;
    (sum, (product - (sum - part)) + (c - part))
}

/// `a * b + c`, rounded down.
pub(super) fn down(a: f32, b: f32, c: f32) -> f32 {
    let (sum, lost) = sum(a, b, c);
    if sum == 0.0 && lost == 0.0 {
        let positive = (f64::from(a) * f64::from(b)).is_sign_positive() && c.is_sign_positive();
        return if positive { 0.0 } else { -0.0 };
    }
    let nearest = sum as f32;
    let above = f64::from(nearest) > sum || f64::from(nearest) == sum && lost < 0.0;
    if above { nearest.next_down() } else { nearest }
}

/// `a * b + c`, rounded up.
pub(super) fn up(a: f32, b: f32, c: f32) -> f32 {
    -down(-a, b, -c)
}

/// `a * b + c`, rounded toward zero.
pub(super) fn toward_zero(a: f32, b: f32, c: f32) -> f32 {
    let (sum, lost) = sum(a, b, c);
    if sum == 0.0 && lost == 0.0 {
        return sum as f32;
    }
    if sum < 0.0 { up(a, b, c) } else { down(a, b, c) }
}

/// A floating-point type, for the rules that both share.
pub(super) trait SignedFloat: Copy + PartialOrd {
    fn is_negative(self) -> bool;
}

impl SignedFloat for f32 {
    fn is_negative(self) -> bool {
        self.is_sign_negative()
    }
}

impl SignedFloat for f64 {
    fn is_negative(self) -> bool {
        self.is_sign_negative()
    }
}

/// The smaller value, in which -0 is less than 0; a number if one is NaN.
#[expect(clippy::eq_op, reason = "only NaN differs from itself")]
pub(super) fn minimum<F: SignedFloat>(a: F, b: F) -> F {
    if a < b || b != b || a == b && a.is_negative() { a } else { b }
}

/// The larger value, in which -0 is less than 0; a number if one is NaN.
#[expect(clippy::eq_op, reason = "only NaN differs from itself")]
pub(super) fn maximum<F: SignedFloat>(a: F, b: F) -> F {
    if a > b || b != b || a == b && b.is_negative() { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_enclose_the_exact_value() {
        let mut state = 1u32;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let exponent = 100 + (state >> 8) % 56;
            f32::from_bits(state & 0x807f_ffff | exponent << 23)
        };
        for _ in 0..20_000 {
            let (a, b, c) = (draw(), draw(), draw());
            let (low, near, high) = (down(a, b, c), a.mul_add(b, c), up(a, b, c));
            assert!(low <= near && near <= high, "{a} {b} {c}: {low} {near} {high}");
            assert!(low == high || low.next_up() == high, "{a} {b} {c}: {low} {high}");
            let zero = toward_zero(a, b, c);
            assert_eq!(zero, if near > 0.0 { low } else { high }, "{a} {b} {c}");
        }
        // A part that is lost in `f64` too still has a direction.
        assert_eq!(down(1.0, 1.0, -2f32.powi(-90)), 1f32.next_down());
        assert_eq!(up(1.0, 1.0, 2f32.powi(-90)), 1f32.next_up());
        assert_eq!(down(1.0, 1.0, -1.0).to_bits(), (-0f32).to_bits());
        assert_eq!(down(0.0, 1.0, 0.0).to_bits(), 0);
    }

    #[test]
    fn numbers_win_over_nan_and_zeros_have_an_order() {
        assert_eq!((minimum(f32::NAN, 1.0), minimum(1.0, f32::NAN), maximum(f64::NAN, 1.0)), (1.0, 1.0, 1.0));
        for (a, b) in [(0.0f32, -0.0), (-0.0, 0.0)] {
            assert_eq!((minimum(a, b).to_bits(), maximum(a, b).to_bits()), ((-0f32).to_bits(), 0));
        }
        assert!(minimum(f32::NAN, f32::NAN).is_nan());
    }
}
