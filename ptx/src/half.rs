//! Conversions between `f32` and the two formats of half precision, rounded to nearest, ties to even.

/// The `f32` value of an IEEE half.
pub(crate) fn from_f16(bits: u16) -> f32 {
    let (sign, exponent, fraction) = (u32::from(bits >> 15) << 31, bits >> 10 & 0x1f, u32::from(bits & 0x3ff));
    let magnitude = match (exponent, fraction) {
        (0, _) => return f32::from_bits(sign | (fraction as f32 * 2f32.powi(-24)).to_bits()),
        (0x1f, 0) => 0x7f80_0000,
        (0x1f, _) => 0x7fff_ffff,
        _ => (u32::from(exponent) + 112) << 23 | fraction << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// The nearest IEEE half; NaN is `0x7fff`.
pub(crate) fn to_f16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = value.abs();
    if magnitude < 2f32.powi(-14) {
        // A multiple of 2^-24: adding 2^-1, whose last place this is, rounds to one.
        let rounded = magnitude + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let bits = magnitude.to_bits();
    let rounded = (bits + 0xfff + (bits >> 13 & 1)) >> 13;
    sign | rounded.saturating_sub(112 << 10).min(0x7c00) as u16
}

/// The `f32` value of a bfloat16.
pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bfloat16; NaN is `0x7fff`.
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() { 0x7fff } else { ((u64::from(bits) + 0x7fff + u64::from(bits >> 16 & 1)) >> 16) as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_a_round_trip() {
        for bits in 0..=u16::MAX {
            let (exponent, fraction) = (bits >> 10 & 0x1f, bits & 0x3ff);
            if exponent == 0x1f && fraction != 0 {
                assert!(from_f16(bits).is_nan());
            } else {
                assert_eq!(to_f16(from_f16(bits)), bits, "{bits:#06x}");
            }
            if !from_bf16(bits).is_nan() {
                assert_eq!(to_bf16(from_bf16(bits)), bits, "{bits:#06x}");
            }
        }
    }

    #[test]
    fn ties_go_to_the_even_neighbour_and_large_values_to_infinity() {
        // Of each pair of adjacent halves, the middle and its two neighbours.
        for bits in 0..0x7c00u16 {
            let (low, high) =
                (f64::from(from_f16(bits)), if bits == 0x7bff { 65536.0 } else { f64::from(from_f16(bits + 1)) });
            let middle = ((low + high) / 2.0) as f32;
            assert_eq!(to_f16(middle), bits + (bits & 1), "{bits:#06x}");
            assert_eq!(to_f16(middle.next_down()), bits, "{bits:#06x}");
            assert_eq!(to_f16(-middle.next_up()), 0x8000 | (bits + 1), "{bits:#06x}");
        }
        assert_eq!((to_f16(1e9), to_f16(f32::NEG_INFINITY), to_f16(f32::NAN)), (0x7c00, 0xfc00, 0x7fff));
        assert_eq!((to_bf16(f32::MAX), to_bf16(f32::NAN), to_bf16(1.0 + 2f32.powi(-8))), (0x7f80, 0x7fff, 0x3f80));
        assert_eq!(to_bf16(1.0 + 3.0 * 2f32.powi(-8)), 0x3f82);
    }
}
