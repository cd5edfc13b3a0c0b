//! Element types of tensors, and the conversion of host values to and from them.

use std::fmt;

use half::{bf16, f16};

/// The element type of a tensor, a run-time value. Nothing is promoted silently: mixing two dtypes is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DType {
    /// 32-bit IEEE floating point, the default.
    F32,
    /// 64-bit IEEE floating point.
    F64,
    /// 16-bit IEEE floating point: stored as 16 bits, computed in `f32`.
    F16,
    /// bfloat16: stored as 16 bits, computed in `f32`.
    BF16,
    /// A 32-bit signed integer.
    I32,
    /// 64-bit signed integer: indices and labels.
    I64,
    /// 32-bit unsigned integer: random bits.
    U32,
    /// 8-bit unsigned integer: bytes, images.
    U8,
    /// Booleans, one byte each, 0 or 1.
    Bool,
    /// 8-bit floating point with 4 bits of exponent, PyTorch's `float8_e4m3fn`: up to ±448, NaN, no infinity. Casts to
    /// it saturate, as PyTorch's do since 2.15. It is [stored](DType::is_storage), not computed in.
    F8E4M3,
    /// 8-bit floating point with 5 bits of exponent, PyTorch's `float8_e5m2`: up to ±57344, NaN, infinities. Casts of
    /// larger values give infinity; `clamp` to ±[`largest`](DType::largest) first if they should saturate. It is
    /// [stored](DType::is_storage), not computed in.
    F8E5M2,
}

impl DType {
    /// Every element type, in declaration order.
    pub const ALL: [DType; 11] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I32,
        DType::I64,
        DType::U32,
        DType::U8,
        DType::Bool,
        DType::F8E4M3,
        DType::F8E5M2,
    ];

    /// The size of one element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 => 1,
        }
    }

    /// Tells whether this is a floating dtype, one of four; only these can carry gradients.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }

    /// Tells whether this is a 16-bit float, which is stored in 16 bits and computed in `f32`.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// Tells whether this is an 8-bit float. Such values are moved, and cast from and to other dtypes with `to_dtype`;
    /// any other operation on them is an error. They carry no gradient.
    pub const fn is_storage(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2)
    }

    /// The largest finite value of a floating dtype, or of an 8-bit float; 0 for others.
    pub const fn largest(self) -> f64 {
        match self {
            DType::F64 => f64::MAX,
            DType::F32 => f32::MAX as f64,
            DType::BF16 => 3.389_531_389_251_535_5e38,
            DType::F16 => 65_504.0,
            DType::F8E5M2 => 57_344.0,
            DType::F8E4M3 => 448.0,
            _ => 0.0,
        }
    }

    /// Tells whether this is `i32`, `i64`, `u32` or `u8`.
    pub const fn is_int(self) -> bool {
        matches!(self, DType::I32 | DType::I64 | DType::U32 | DType::U8)
    }

    /// The dtype of arithmetic: `f32` for f16, bf16 and the 8-bit floats, which are cast to it, the dtype itself
    /// otherwise.
    pub const fn compute(self) -> DType {
        if self.is_half() || self.is_storage() { DType::F32 } else { self }
    }

    /// The name used in messages and files: `f32`, `bf16`, `bool` …
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U32 => "u32",
            DType::U8 => "u8",
            DType::Bool => "bool",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
        }
    }

    /// The element type with this [`name`](DType::name), if there is one.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// The machine epsilon: the spacing of representable values around 1. It is 0 for integers and `bool`.
    pub const fn epsilon(self) -> f64 {
        match self {
            DType::F64 => f64::EPSILON,
            DType::F32 => f32::EPSILON as f64,
            DType::F16 => 9.765_625e-4,
            DType::BF16 => 7.812_5e-3,
            _ => 0.0,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that represents elements of one [`DType`] on the host.
pub trait Element: sealed::Sealed + Copy + Default + PartialEq + fmt::Debug + Send + Sync + 'static {
    /// The element type of a tensor of these values.
    const DTYPE: DType;
    /// The value as the nearest `f64`.
    fn to_f64(self) -> f64;
    /// The nearest value of this type (integers saturate, `bool` is `x != 0`).
    fn from_f64(x: f64) -> Self;
    /// The bytes of a slice, in the format that runtimes store.
    fn bytes(x: &[Self]) -> &[u8];
    /// Fills `to` from bytes that a runtime stored; the lengths in bytes must agree.
    fn fill(to: &mut [Self], bytes: &[u8]);
}

macro_rules! element {
    ($($t:ty, $d:ident, $to:expr, $from:expr;)*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            fn to_f64(self) -> f64 { ($to)(self) }
            fn from_f64(x: f64) -> Self { ($from)(x) }
            fn bytes(x: &[Self]) -> &[u8] { bytemuck::cast_slice(x) }
            fn fill(to: &mut [Self], bytes: &[u8]) { bytemuck::cast_slice_mut::<$t, u8>(to).copy_from_slice(bytes) }
        }
    )*};
}

element! {
    f32, F32, f64::from, |x| x as f32;
    f64, F64, |x| x, |x| x;
    f16, F16, f16::to_f64, f16::from_f64;
    bf16, BF16, bf16::to_f64, bf16::from_f64;
    i32, I32, f64::from, |x| x as i32;
    i64, I64, |x| x as f64, |x| x as i64;
    u32, U32, f64::from, |x| x as u32;
    u8, U8, f64::from, |x| x as u8;
}

impl sealed::Sealed for bool {}
impl Element for bool {
    const DTYPE: DType = DType::Bool;
    fn to_f64(self) -> f64 {
        f64::from(u8::from(self))
    }
    fn from_f64(x: f64) -> Self {
        x != 0.0
    }
    fn bytes(x: &[Self]) -> &[u8] {
        bytemuck::cast_slice(x)
    }
    fn fill(to: &mut [Self], bytes: &[u8]) {
        for (t, b) in to.iter_mut().zip(bytes) {
            *t = *b != 0;
        }
    }
}

/// A scalar passed to a kernel at launch, so that a learning rate can change without a new kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A real scalar, rounded to the dtype of the operands it is combined with.
    F64(f64),
    /// An integer scalar, exact in integer programs.
    I64(i64),
    /// An unsigned integer: seeds, counters.
    U64(u64),
}

impl Scalar {
    /// The value as the nearest `f64`.
    pub fn to_f64(self) -> f64 {
        match self {
            Scalar::F64(x) => x,
            Scalar::I64(x) => x as f64,
            Scalar::U64(x) => x as f64,
        }
    }

    /// The value as an integer: reals truncate and saturate, `u64` keeps its bits.
    pub fn to_i64(self) -> i64 {
        match self {
            Scalar::F64(x) => x as i64,
            Scalar::I64(x) => x,
            Scalar::U64(x) => x as i64,
        }
    }
}

/// The number as it was given.
impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::F64(x) => x.fmt(f),
            Scalar::I64(x) => x.fmt(f),
            Scalar::U64(x) => x.fmt(f),
        }
    }
}

macro_rules! scalar_from {
    ($($t:ty => $v:ident as $w:ty),*) => {$(
        impl From<$t> for Scalar { fn from(x: $t) -> Self { Scalar::$v(x as $w) } }
    )*};
}
scalar_from!(f32 => F64 as f64, f64 => F64 as f64, i32 => I64 as i64, i64 => I64 as i64, u32 => U64 as u64, u64 => U64 as u64, usize => U64 as u64, bool => I64 as i64);
