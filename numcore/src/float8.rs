//! The two 8-bit floating formats (Micikevicius et al. 2022, "FP8 formats for deep learning"): codes to `f32` and back.
//!
//! Branch-free in integers, so that a plain loop over a block becomes vector instructions.

/// An 8-bit floating format: a sign, an exponent with this bias, and a fraction of `FRACTION` bits.
pub struct Float8<const FRACTION: u32, const BIAS: u32>;

/// The format of [`DType::F8E4M3`](crate::DType::F8E4M3). It has no infinity, and one NaN of each sign.
pub type E4M3 = Float8<3, 7>;

/// The format of [`DType::F8E5M2`](crate::DType::F8E5M2), the upper half of an IEEE binary16.
pub type E5M2 = Float8<2, 15>;

const INF_F32: u32 = 0x7f80_0000;
const QUIET_NAN_F32: u32 = 0x7fc0_0000;

impl<const FRACTION: u32, const BIAS: u32> Float8<FRACTION, BIAS> {
    /// The code without its sign from which on a number is not finite.
    const SPECIAL: u32 = if FRACTION == 3 { 0x7f } else { 0x7c };
    /// The code of numbers that are too large, without its sign.
    const OVERFLOW: u32 = if FRACTION == 3 { 0x7e } else { 0x7c };

    /// The value of a code, exactly.
    #[inline(always)]
    pub fn decode(code: u8) -> f32 {
        let magnitude = u32::from(code & 0x7f);
        // The same digits read as an f32 are a power of two too small, also where they are subnormal.
        let small = f32::from_bits(magnitude << (23 - FRACTION));
        let finite = (small * f32::from_bits((254 - BIAS) << 23)).to_bits();
        let infinite = FRACTION == 2 && magnitude == Self::SPECIAL;
        let special = if infinite { INF_F32 } else { small.to_bits() | QUIET_NAN_F32 };
        let bits = if magnitude >= Self::SPECIAL { special } else { finite };
        f32::from_bits(bits | u32::from(code & 0x80) << 24)
    }

    /// The code of the nearest number, ties to even. A larger number than the largest becomes infinity in [`E5M2`]. In
    /// [`E4M3`] it becomes the largest, as infinity does; this is the cast of PyTorch 2.15.
    #[inline(always)]
    pub fn encode(x: f32) -> u8 {
        let sign = (x.to_bits() >> 24) & 0x80;
        let a = x.to_bits() & 0x7fff_ffff;
        // Subnormal: adding a power of two leaves a multiple of the smallest number in the low bits, rounded.
        let magic = (127 + 23 + 1 - BIAS - FRACTION) << 23;
        let subnormal = (f32::from_bits(a) + f32::from_bits(magic)).to_bits().wrapping_sub(magic);
        // Normal: exponent re-biased, half a ULP less one unit added, and one more if the result would be odd.
        let half = (1 << (22 - FRACTION)) - 1 + ((a >> (23 - FRACTION)) & 1);
        let normal = a.wrapping_sub((127 - BIAS) << 23).wrapping_add(half) >> (23 - FRACTION);
        let code = if a < (128 - BIAS) << 23 { subnormal } else { normal.min(Self::OVERFLOW) };
        (sign | if a > INF_F32 { 0x7f } else { code }) as u8
    }
}
