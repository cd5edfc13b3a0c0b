//! Conversions. The text has the result's type before the operand's.

use super::rows;
use crate::half::{from_bf16, from_f16, to_bf16, to_f16};

rows! {
    // Integers: bits are dropped, or copies of the sign are added.
    "cvt.u8" [u16 s16 u32 s32 u64 s64] (a: T) -> u8 => a as u8;
    "cvt.s8" [u16 s16 u32 s32 u64 s64] (a: T) -> i8 => a as i8;
    "cvt.u16" [u8 s8 u16 s16 u32 s32 u64 s64] (a: T) -> u16 => a as u16;
    "cvt.s16" [u8 s8 u16 s16 u32 s32 u64 s64] (a: T) -> i16 => a as i16;
    "cvt.u32" [u8 s8 u16 s16 u32 s32 u64 s64] (a: T) -> u32 => a as u32;
    "cvt.s32" [u8 s8 u16 s16 u32 s32 u64 s64] (a: T) -> i32 => a as i32;
    "cvt.u64" [u8 s8 u16 s16 u32 s32 u64 s64] (a: T) -> u64 => a as u64;
    "cvt.s64" [u8 s8 u16 s16 u32 s32 u64 s64] (a: T) -> i64 => a as i64;
    "cvt.rn.f32" [u8 s8 u16 s16 u32 s32 u64 s64 f64] (a: T) -> f32 => a as f32;
    "cvt.rn.f64" [u8 s8 u16 s16 u32 s32 u64 s64] (a: T) -> f64 => a as f64;
    "cvt.f64" [f32] (a: f32) -> f64 => f64::from(a);
    // From floating point; what does not fit is the type's end. NaN is 0 from 32 bits to at most 32 bits, and the highest
    // bit alone otherwise.
    "cvt.rzi.u16" [f32] (a: f32) -> u16 => a as u16;
    "cvt.rzi.s16" [f32] (a: f32) -> i16 => a as i16;
    "cvt.rzi.u32" [f32] (a: f32) -> u32 => a as u32;
    "cvt.rzi.s32" [f32] (a: f32) -> i32 => a as i32;
    "cvt.rni.s32" [f32] (a: f32) -> i32 => a.round_ties_even() as i32;
    "cvt.rmi.s32" [f32] (a: f32) -> i32 => a.floor() as i32;
    "cvt.rzi.u16" [f64] (a: f64) -> u16 => if a.is_nan() { 1 << 15 } else { a as u16 };
    "cvt.rzi.s16" [f64] (a: f64) -> i16 => if a.is_nan() { i16::MIN } else { a as i16 };
    "cvt.rzi.u32" [f64] (a: f64) -> u32 => if a.is_nan() { 1 << 31 } else { a as u32 };
    "cvt.rzi.s32" [f64] (a: f64) -> i32 => if a.is_nan() { i32::MIN } else { a as i32 };
    "cvt.rni.s32" [f64] (a: f64) -> i32 => if a.is_nan() { i32::MIN } else { a.round_ties_even() as i32 };
    "cvt.rmi.s32" [f64] (a: f64) -> i32 => if a.is_nan() { i32::MIN } else { a.floor() as i32 };
    "cvt.rzi.u64" [f32 f64] (a: T) -> u64 => if a.is_nan() { 1 << 63 } else { a as u64 };
    "cvt.rzi.s64" [f32 f64] (a: T) -> i64 => if a.is_nan() { i64::MIN } else { a as i64 };
    "cvt.rni.s64" [f32 f64] (a: T) -> i64 => if a.is_nan() { i64::MIN } else { a.round_ties_even() as i64 };
    // To whole numbers of the same type.
    "cvt.rni.f32" [f32] (a: f32) -> f32 => a.round_ties_even();
    "cvt.rni.f64" [f64] (a: f64) -> f64 => a.round_ties_even();
    "cvt.rzi.f32" [f32] (a: f32) -> f32 => a.trunc();
    "cvt.rzi.f64" [f64] (a: f64) -> f64 => a.trunc();
    "cvt.rmi.f32" [f32] (a: f32) -> f32 => a.floor();
    "cvt.rmi.f64" [f64] (a: f64) -> f64 => a.floor();
    "cvt.rpi.f32" [f32] (a: f32) -> f32 => a.ceil();
    "cvt.rpi.f64" [f64] (a: f64) -> f64 => a.ceil();
    // Into [0, 1]; NaN is 0.
    "cvt.sat.f32" [f32] (a: f32) -> f32 => if a > 0.0 { a.min(1.0) } else { 0.0 };
    // Halves.
    "cvt.f32" [f16] (a: u16) -> f32 => from_f16(a);
    "cvt.f32" [bf16] (a: u16) -> f32 => from_bf16(a);
    "cvt.rn.f16" [f32] (a: f32) -> u16 => to_f16(a);
    "cvt.rn.bf16" [f32] (a: f32) -> u16 => to_bf16(a);
    "cvt.rn.f16x2" [f32] (high: f32, low: f32) -> u32 => u32::from(to_f16(high)) << 16 | u32::from(to_f16(low));
    "cvt.rn.bf16x2" [f32] (high: f32, low: f32) -> u32 => u32::from(to_bf16(high)) << 16 | u32::from(to_bf16(low));
}
