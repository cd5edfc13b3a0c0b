//! Comparisons: a predicate from two values. Those of floating point that end in `u` also hold if a value is NaN.

use super::rows;

rows! {
    "setp.eq" [b16 u16 s16 b32 u32 s32 b64 u64 s64 f32 f64] (a: T, b: T) -> bool => a == b;
    "setp.ne" [b16 u16 s16 b32 u32 s32 b64 u64 s64] (a: T, b: T) -> bool => a != b;
    "setp.ne" [f32 f64] (a: T, b: T) -> bool => a != b && !a.is_nan() && !b.is_nan();
    "setp.lt" [u16 s16 u32 s32 u64 s64 f32 f64] (a: T, b: T) -> bool => a < b;
    "setp.le" [u16 s16 u32 s32 u64 s64 f32 f64] (a: T, b: T) -> bool => a <= b;
    "setp.gt" [u16 s16 u32 s32 u64 s64 f32 f64] (a: T, b: T) -> bool => a > b;
    "setp.ge" [u16 s16 u32 s32 u64 s64 f32 f64] (a: T, b: T) -> bool => a >= b;
    "setp.equ" [f32 f64] (a: T, b: T) -> bool => a == b || a.is_nan() || b.is_nan();
    "setp.neu" [f32 f64] (a: T, b: T) -> bool => a != b;
    "setp.ltu" [f32 f64] (a: T, b: T) -> bool => a < b || a.is_nan() || b.is_nan();
    "setp.leu" [f32 f64] (a: T, b: T) -> bool => a <= b || a.is_nan() || b.is_nan();
    "setp.gtu" [f32 f64] (a: T, b: T) -> bool => a > b || a.is_nan() || b.is_nan();
    "setp.geu" [f32 f64] (a: T, b: T) -> bool => a >= b || a.is_nan() || b.is_nan();
    "setp.num" [f32 f64] (a: T, b: T) -> bool => !a.is_nan() && !b.is_nan();
    "setp.nan" [f32 f64] (a: T, b: T) -> bool => a.is_nan() || b.is_nan();
    "testp.finite" [f32 f64] (a: T) -> bool => a.is_finite();
    "testp.infinite" [f32 f64] (a: T) -> bool => a.is_infinite();
    "testp.notanumber" [f32 f64] (a: T) -> bool => a.is_nan();
}
