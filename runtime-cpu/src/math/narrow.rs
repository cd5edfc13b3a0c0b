//! Conversion of f16 and bf16 bits to `f32` and back: rounded to nearest, ties to even; NaN stays NaN and becomes
//! quiet.
//!
//! Branch-free in integers, so that a plain loop over a block becomes vector instructions on every machine.

/// Sign, exponent and fraction masks of the 16-bit formats.
const SIGN: u16 = 0x8000;
const QUIET_F32: u32 = 0x0040_0000;
const INF_F32: u32 = 0x7f80_0000;

/// An IEEE binary16 as `f32`: exact.
#[inline(always)]
pub(crate) fn f16_to_f32(h: u16) -> f32 {
    // The same digits read as an f32 are 2^112 too small, also where they are subnormal.
    let small = f32::from_bits(u32::from(h & !SIGN) << 13);
    let finite = (small * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = small.to_bits() | INF_F32;
    let special = if special == INF_F32 { INF_F32 } else { special | QUIET_F32 };
    let bits = if h & !SIGN >= 0x7c00 { special } else { finite };
    f32::from_bits(bits | u32::from(h & SIGN) << 16)
}

/// The nearest IEEE binary16; from 65520 on infinity.
#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) as u16 & SIGN;
    let a = x.to_bits() & 0x7fff_ffff;
    // Subnormal: adding 1/2 leaves a multiple of 2^-24 in the low bits, rounded by the addition.
    let subnormal = (f32::from_bits(a) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    // Normal: exponent re-biased, half a ULP less one unit added, and one more if the result would be odd.
    let normal = a.wrapping_sub(112 << 23).wrapping_add(0x0fff + ((a >> 13) & 1)) >> 13;
    let finite = if a < (113 << 23) { subnormal } else { normal };
    let nan = 0x7e00 | ((a >> 13) & 0x03ff);
    let large = if a > INF_F32 { nan } else { 0x7c00 };
    let bits = if a >= 0x477f_f000 { large } else { finite };
    sign | bits as u16
}

/// A bfloat16 as `f32`: exact.
#[inline(always)]
pub(crate) fn bf16_to_f32(h: u16) -> f32 {
    let bits = u32::from(h) << 16;
    let nan = bits & 0x7fff_ffff > INF_F32;
    f32::from_bits(if nan { bits | QUIET_F32 } else { bits })
}

/// The nearest bfloat16.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits | QUIET_F32) >> 16;
    let nan = bits & 0x7fff_ffff > INF_F32;
    (if nan { quiet } else { rounded }) as u16
}
