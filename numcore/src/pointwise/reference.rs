//! Ops evaluated on the host. They are the reference of every runtime's tests, and give the values of a program that
//! depend on scalars alone.
//!
//! Floats are computed in `f64` by `libm`'s fixed arithmetic, so all ranks agree to the last bit with any system
//! library. An element of dtype `f32` is then rounded to it, which for `+ − × ÷ √` is exactly the result of `f32`
//! arithmetic. Integers are computed in `i64` and wrapped to their dtype.

use std::cmp::Ordering;

use half::{bf16, f16};

use crate::{
    DType, Scalar,
    float8::{E4M3, E5M2},
};

/// A scalar value on the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A value of a floating dtype.
    Float(f64),
    /// A value of an integer dtype.
    Int(i64),
    /// A value of dtype `bool`.
    Bool(bool),
}

impl Number {
    /// This value as the nearest `f64`.
    pub fn to_f64(self) -> f64 {
        match self {
            Number::Float(x) => x,
            Number::Int(x) => x as f64,
            Number::Bool(x) => f64::from(u8::from(x)),
        }
    }

    /// This value as an integer; reals truncate and saturate.
    pub fn to_i64(self) -> i64 {
        match self {
            Number::Float(x) => x as i64,
            Number::Int(x) => x,
            Number::Bool(x) => i64::from(x),
        }
    }

    /// This value as `bool`: true unless it is 0.
    pub fn to_bool(self) -> bool {
        match self {
            Number::Float(x) => x != 0.0,
            Number::Int(x) => x != 0,
            Number::Bool(x) => x,
        }
    }

    /// This value cast to another dtype. Floats round (f16 and bf16 too), floats to integers truncate and saturate, and
    /// integers wrap.
    pub fn cast(self, to: DType) -> Number {
        match to {
            DType::F16 => Number::Float(f16::from_f32(self.to_f32()).to_f64()),
            DType::BF16 => Number::Float(bf16::from_f32(self.to_f32()).to_f64()),
            DType::F8E4M3 => Number::Float(E4M3::decode(E4M3::encode(self.to_f32())).into()),
            DType::F8E5M2 => Number::Float(E5M2::decode(E5M2::encode(self.to_f32())).into()),
            to => self.computed_as(to),
        }
    }

    /// This value cast as [`cast`](Number::cast) does, except that f16 and bf16 keep the precision of `f32`, in which
    /// they are computed.
    pub fn computed_as(self, dtype: DType) -> Number {
        match dtype {
            _ if dtype.compute() == DType::F32 => Number::Float(f64::from(self.to_f32())),
            DType::F64 => Number::Float(self.to_f64()),
            DType::I64 => Number::Int(self.to_i64()),
            DType::I32 => self.narrow(|x| x as i32, |x| x as i32),
            DType::U32 => self.narrow(|x| x as u32, |x| x as u32),
            DType::U8 => self.narrow(|x| x as u8, |x| x as u8),
            _ => Number::Bool(self.to_bool()),
        }
    }

    fn to_f32(self) -> f32 {
        if let Number::Int(x) = self { x as f32 } else { self.to_f64() as f32 }
    }

    fn narrow<T: Into<i64>>(self, real: fn(f64) -> T, whole: fn(i64) -> T) -> Number {
        Number::Int(if let Number::Float(x) = self { real(x) } else { whole(self.to_i64()) }.into())
    }

    fn compare(self, other: Number) -> Option<Ordering> {
        match (self, other) {
            (Number::Int(a), Number::Int(b)) => Some(a.cmp(&b)),
            (a, b) => a.to_f64().partial_cmp(&b.to_f64()),
        }
    }
}

impl From<Scalar> for Number {
    fn from(x: Scalar) -> Number {
        match x {
            Scalar::F64(x) => Number::Float(x),
            whole => Number::Int(whole.to_i64()),
        }
    }
}

/// The host function of a unary op: on floats; on floats and integers; on `bool`.
pub(super) enum Does1 {
    Float(fn(f64) -> f64),
    Number(fn(f64) -> f64, fn(i64) -> i64),
    Bool(fn(bool) -> bool),
}

impl Does1 {
    pub(super) fn apply(self, x: Number) -> Number {
        match self {
            Does1::Number(_, f) if matches!(x, Number::Int(_)) => Number::Int(f(x.to_i64())),
            Does1::Float(f) | Does1::Number(f, _) => Number::Float(f(x.to_f64())),
            Does1::Bool(f) => Number::Bool(f(x.to_bool())),
        }
    }
}

/// The host function of a binary op. Shifts also get the width of their dtype, comparisons the ordering.
pub(super) enum Does2 {
    Float(fn(f64, f64) -> f64),
    Number(fn(f64, f64) -> f64, fn(i64, i64) -> i64),
    Int(fn(i64, i64, u32) -> i64),
    Bits(fn(i64, i64) -> i64),
    Same(fn(Option<Ordering>) -> bool),
    Order(fn(Option<Ordering>) -> bool),
}

impl Does2 {
    pub(super) fn apply(self, a: Number, b: Number, bits: u32) -> Number {
        match self {
            Does2::Number(_, f) if matches!(a, Number::Int(_)) => Number::Int(f(a.to_i64(), b.to_i64())),
            Does2::Float(f) | Does2::Number(f, _) => Number::Float(f(a.to_f64(), b.to_f64())),
            Does2::Int(f) => Number::Int(f(a.to_i64(), b.to_i64(), bits)),
            Does2::Bits(f) if matches!(a, Number::Bool(_)) => Number::Bool(f(a.to_i64(), b.to_i64()) != 0),
            Does2::Bits(f) => Number::Int(f(a.to_i64(), b.to_i64())),
            Does2::Same(f) | Does2::Order(f) => Number::Bool(f(a.compare(b))),
        }
    }
}

pub(super) fn sign(x: f64) -> f64 {
    if x == 0.0 || x.is_nan() { x.abs() } else { 1f64.copysign(x) }
}

pub(super) fn max(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

pub(super) fn min(a: f64, b: f64) -> f64 {
    if a < b || a.is_nan() { a } else { b }
}

/// The remainder by an exact `fmod`, so that the result is below `b` even where `a/b` is large.
pub(super) fn rem(a: f64, b: f64) -> f64 {
    let r = a % b;
    if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
}

pub(super) fn whole_rem(a: i64, b: i64) -> i64 {
    let r = if b == 0 { 0 } else { a.wrapping_rem(b) };
    if r != 0 && (r < 0) != (b < 0) { r + b } else { r }
}

/// The power by repeated squaring, with wrapping.
pub(super) fn power(a: i64, b: i64) -> i64 {
    match (a, b) {
        (1, _) => 1,
        (-1, _) if b & 1 == 0 => 1,
        (-1, _) => -1,
        (_, ..0) => 0,
        (mut square, mut left) => {
            let mut result = 1i64;
            while left > 0 {
                if left & 1 == 1 {
                    result = result.wrapping_mul(square);
                }
                square = square.wrapping_mul(square);
                left >>= 1;
            }
            result
        }
    }
}
