//! Integers and bits: arithmetic wraps, shifts stop at the width.

use super::rows;

rows! {
    "mov" [b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 pred] (a: T) -> T => a;
    "add" [u16 s16 u32 s32 u64 s64] (a: T, b: T) -> T => a.wrapping_add(b);
    "sub" [u16 s16 u32 s32 u64 s64] (a: T, b: T) -> T => a.wrapping_sub(b);
    "mul.lo" [u16 s16 u32 s32 u64 s64] (a: T, b: T) -> T => a.wrapping_mul(b);
    "mul.hi" [u32] (a: u32, b: u32) -> u32 => ((u64::from(a) * u64::from(b)) >> 32) as u32;
    "mul.hi" [s32] (a: i32, b: i32) -> i32 => ((i64::from(a) * i64::from(b)) >> 32) as i32;
    "mul.hi" [u64] (a: u64, b: u64) -> u64 => ((u128::from(a) * u128::from(b)) >> 64) as u64;
    "mul.hi" [s64] (a: i64, b: i64) -> i64 => ((i128::from(a) * i128::from(b)) >> 64) as i64;
    "mul.wide" [u16] (a: u16, b: u16) -> u32 => u32::from(a) * u32::from(b);
    "mul.wide" [s16] (a: i16, b: i16) -> i32 => i32::from(a) * i32::from(b);
    "mul.wide" [u32] (a: u32, b: u32) -> u64 => u64::from(a) * u64::from(b);
    "mul.wide" [s32] (a: i32, b: i32) -> i64 => i64::from(a) * i64::from(b);
    "mad.lo" [u16 s16 u32 s32 u64 s64] (a: T, b: T, c: T) -> T => a.wrapping_mul(b).wrapping_add(c);
    "mad.hi" [u32] (a: u32, b: u32, c: u32) -> u32 => (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c);
    "mad.wide" [u32] (a: u32, b: u32, c: u64) -> u64 => (u64::from(a) * u64::from(b)).wrapping_add(c);
    "mad.wide" [s32] (a: i32, b: i32, c: i64) -> i64 => (i64::from(a) * i64::from(b)).wrapping_add(c);
    // The result of a division by zero is not defined; these are the devices' results.
    "div" [u16 u32 u64] (a: T, b: T) -> T => a.checked_div(b).unwrap_or(T::MAX);
    "div" [s16 s32 s64] (a: T, b: T) -> T => if b == 0 { -1 } else { a.wrapping_div(b) };
    "rem" [u16 u32 u64] (a: T, b: T) -> T => a.checked_rem(b).unwrap_or(a);
    "rem" [s16 s32 s64] (a: T, b: T) -> T => if b == 0 { a } else { a.wrapping_rem(b) };
    "neg" [s16 s32 s64] (a: T) -> T => a.wrapping_neg();
    "abs" [s16 s32 s64] (a: T) -> T => a.wrapping_abs();
    "min" [u16 s16 u32 s32 u64 s64] (a: T, b: T) -> T => a.min(b);
    "max" [u16 s16 u32 s32 u64 s64] (a: T, b: T) -> T => a.max(b);
    "and" [b16 b32 b64 pred] (a: T, b: T) -> T => a & b;
    "or" [b16 b32 b64 pred] (a: T, b: T) -> T => a | b;
    "xor" [b16 b32 b64 pred] (a: T, b: T) -> T => a ^ b;
    "not" [b16 b32 b64 pred] (a: T) -> T => !a;
    "shl" [b16 b32 b64] (a: T, by: u32) -> T => if by < T::BITS { a << by } else { 0 };
    "shr" [b16 u16 b32 u32 b64 u64] (a: T, by: u32) -> T => if by < T::BITS { a >> by } else { 0 };
    "shr" [s16 s32 s64] (a: T, by: u32) -> T => a >> by.min(T::BITS - 1);
    "shf.l.wrap" [b32] (low: u32, high: u32, by: u32) -> u32 => (joined(low, high) << (by & 31) >> 32) as u32;
    "shf.r.wrap" [b32] (low: u32, high: u32, by: u32) -> u32 => (joined(low, high) >> (by & 31)) as u32;
    "shf.l.clamp" [b32] (low: u32, high: u32, by: u32) -> u32 => (joined(low, high) << by.min(32) >> 32) as u32;
    "shf.r.clamp" [b32] (low: u32, high: u32, by: u32) -> u32 => (joined(low, high) >> by.min(32)) as u32;
    "popc" [b32 b64] (a: T) -> u32 => a.count_ones();
    "clz" [b32 b64] (a: T) -> u32 => a.leading_zeros();
    "brev" [b32 b64] (a: T) -> T => a.reverse_bits();
    "bfe" [u32] (a: u32, at: u32, length: u32) -> u32 => a.checked_shr(at & 255).unwrap_or(0) & ones(length & 255) as u32;
    "bfi" [b32] (a: u32, b: u32, at: u32, length: u32) -> u32 => insert(a.into(), b.into(), at & 255, length & 255) as u32;
    "bfi" [b64] (a: u64, b: u64, at: u32, length: u32) -> u64 => insert(a, b, at & 255, length & 255);
    "prmt" [b32] (a: u32, b: u32, picks: u32) -> u32 => permute(joined(a, b), picks);
    "selp" [b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64] (a: T, b: T, which: bool) -> T => if which { a } else { b };
    // The parts of moves between a register and a vector of registers.
    "pack" [b32] (low: u16, high: u16) -> u32 => u32::from(low) | u32::from(high) << 16;
    "pack" [b64] (low: u32, high: u32) -> u64 => joined(low, high);
    "low" [b32] (a: u32) -> u16 => a as u16;
    "low" [b64] (a: u64) -> u32 => a as u32;
    "high" [b32] (a: u32) -> u16 => (a >> 16) as u16;
    "high" [b64] (a: u64) -> u32 => (a >> 32) as u32;
}

fn joined(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn ones(length: u32) -> u64 {
    1u64.checked_shl(length).map_or(u64::MAX, |next| next - 1)
}

/// `b` with `length` bits from place `at` on replaced by the lowest bits of `a`.
fn insert(a: u64, b: u64, at: u32, length: u32) -> u64 {
    let mask = ones(length).checked_shl(at).unwrap_or(0);
    b & !mask | a.checked_shl(at).unwrap_or(0) & mask
}

/// The bytes of `bytes` that the four lowest hexadecimal digits of `picks` name; the top bit of a digit asks for copies
/// of the byte's sign.
fn permute(bytes: u64, picks: u32) -> u32 {
    let pick = |digit: u32| {
        let digit = picks >> (4 * digit) & 15;
        let byte = (bytes >> (8 * (digit & 7))) as u8;
        if digit & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
    };
    u32::from_le_bytes([pick(0), pick(1), pick(2), pick(3)])
}
