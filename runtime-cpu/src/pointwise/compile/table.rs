//! The step for each operation and type: one row each. Half-precision elements are computed as `f32`, `bool` is a byte
//! of 0 or 1.

use numcore::{
    DType,
    float8::{E4M3, E5M2},
    pointwise::{Binary, Unary},
};

use crate::{
    Simd,
    element::{Lane, by_lane},
    math::{Int, Math},
    pointwise::execute::{
        Map1, Map2, Map3, StepFn, Sum, copy, fold, long1, map1, map2, map3, narrow, patched, random, trig,
    },
};

/// A step for an element function, written in place: `row!(simd, [T: Math] |x: T| -> T { … })`.
macro_rules! row {
    ($simd:expr, [$($G:ident: ($($B:tt)*)),*] |$a:ident: $A:ty| -> $D:ty { $e:expr }) => {
        row!(@ $simd, [$($G: ($($B)*)),*], Map1<$A, $D>, map1 [$A, $D], ($a: $A) -> $D { $e })
    };
    ($simd:expr, [$($G:ident: ($($B:tt)*)),*] |$a:ident: $A:ty, $b:ident: $Y:ty| -> $D:ty { $e:expr }) => {
        row!(@ $simd, [$($G: ($($B)*)),*], Map2<$A, $Y, $D>, map2 [$A, $Y, $D], ($a: $A, $b: $Y) -> $D { $e })
    };
    ($simd:expr, [$($G:ident: ($($B:tt)*)),*] |$a:ident: $A:ty, $b:ident: $Y:ty, $c:ident: $Z:ty| -> $D:ty { $e:expr }) => {
        row!(@ $simd, [$($G: ($($B)*)),*], Map3<$A, $Y, $Z, $D>, map3 [$A, $Y, $Z, $D], ($a: $A, $b: $Y, $c: $Z) -> $D { $e })
    };
    (@ $simd:expr, [$($G:ident: ($($B:tt)*)),*], $Trait:ty, $map:ident [$($P:ty),*], ($($x:ident: $X:ty),*) -> $D:ty { $e:expr }) => {{
        struct Row;
        impl<$($G: $($B)*),*> $Trait for Row {
            #[inline(always)]
            fn f($($x: $X),*) -> $D { $e }
        }
        $map::<$($P,)* Row>($simd)
    }};
}

/// Rows of one type parameter: `T` to `T`, or as written; functions of many dependent instructions are `long`.
macro_rules! rows {
    ($simd:expr, $op:expr, $T:ident: $B:ident; $($v:pat => $($long:ident)? |$($x:ident),*| $e:expr;)*) => {
        match $op { $($v => Some(rows!(@ $simd, $T: $B; $($long)? |$($x),*| $e)),)* _ => None }
    };
    (@ $simd:expr, $T:ident: $B:ident; long |$x:ident| $e:expr) => {
        row!(@ $simd, [$T: ($B)], Map1<$T, $T>, long1 [$T, $T], ($x: $T) -> $T { $e })
    };
    (@ $simd:expr, $T:ident: $B:ident; |$x:ident| $e:expr) => { row!($simd, [$T: ($B)] |$x: $T| -> $T { $e }) };
    (@ $simd:expr, $T:ident: $B:ident; |$x:ident, $y:ident| $e:expr) => { row!($simd, [$T: ($B)] |$x: $T, $y: $T| -> $T { $e }) };
}

/// The step of a unary operation on (compute) type `t`, if it takes that.
pub(in crate::pointwise) fn unary(op: Unary, t: DType, simd: Simd) -> Option<StepFn> {
    match t {
        DType::F32 => unary_float::<f32>(op, simd),
        DType::F64 => match op {
            Unary::Sin => Some(patched::<trig::Sin>(simd)),
            Unary::Cos => Some(patched::<trig::Cos>(simd)),
            Unary::Tan => Some(patched::<trig::Tan>(simd)),
            _ => unary_float::<f64>(op, simd),
        },
        DType::I32 => unary_int::<i32>(op, simd),
        DType::I64 => unary_int::<i64>(op, simd),
        DType::U32 => unary_int::<u32>(op, simd),
        DType::U8 => unary_int::<u8>(op, simd),
        DType::Bool if op == Unary::Not => Some(row!(simd, [] |x: u8| -> u8 { x ^ 1 })),
        _ => None,
    }
}

fn unary_float<T: Math + 'static>(op: Unary, simd: Simd) -> Option<StepFn> {
    use Unary::*;
    rows! { simd, op, T: Math;
        Neg => |x| -x;
        Abs => |x| x.abs();
        Sign => |x| x.sign();
        Exp => long |x| Math::exp(x);
        Expm1 => long |x| x.expm1();
        Exp2 => long |x| Math::exp2(x);
        Log => long |x| Math::log(x);
        Log1p => long |x| x.log1p();
        Log2 => long |x| Math::log2(x);
        Sqrt => |x| x.sqrt();
        Rsqrt => |x| x.rsqrt();
        Recip => |x| Math::recip(x);
        Sin => long |x| Math::sin(x);
        Cos => long |x| Math::cos(x);
        Tan => long |x| Math::tan(x);
        Asin => long |x| Math::asin(x);
        Acos => long |x| Math::acos(x);
        Atan => long |x| Math::atan(x);
        Sinh => long |x| Math::sinh(x);
        Cosh => long |x| Math::cosh(x);
        Tanh => long |x| Math::tanh(x);
        Erf => long |x| Math::erf(x);
        Erfc => long |x| Math::erfc(x);
        Floor => |x| x.floor();
        Ceil => |x| x.ceil();
        Round => |x| x.round_ties_even();
        Trunc => |x| x.trunc();
    }
}

fn unary_int<T: Int + 'static>(op: Unary, simd: Simd) -> Option<StepFn> {
    rows! { simd, op, T: Int;
        Unary::Neg => |x| x.neg();
        Unary::Abs => |x| x.abs();
        Unary::Sign => |x| x.sign();
    }
}

/// The step of a binary operation on operands of (compute) type `t`, if it takes that.
pub(in crate::pointwise) fn binary(op: Binary, t: DType, simd: Simd) -> Option<StepFn> {
    if op.is_comparison() {
        return Some(by_lane!(t, T => comparison::<T>(op, simd)));
    }
    match t {
        DType::F32 => binary_float::<f32>(op, simd),
        DType::F64 => binary_float::<f64>(op, simd),
        DType::I32 => binary_int::<i32>(op, simd),
        DType::I64 => binary_int::<i64>(op, simd),
        DType::U32 => binary_int::<u32>(op, simd),
        DType::U8 => binary_int::<u8>(op, simd),
        DType::Bool if matches!(op, Binary::And | Binary::Or | Binary::Xor) => binary_int::<u8>(op, simd),
        _ => None,
    }
}

fn comparison<T: Copy + PartialOrd>(op: Binary, simd: Simd) -> StepFn {
    match op {
        Binary::Eq => row!(simd, [T: (Copy + PartialOrd)] |x: T, y: T| -> u8 { (x == y) as u8 }),
        Binary::Ne => row!(simd, [T: (Copy + PartialOrd)] |x: T, y: T| -> u8 { (x != y) as u8 }),
        Binary::Lt => row!(simd, [T: (Copy + PartialOrd)] |x: T, y: T| -> u8 { (x < y) as u8 }),
        _ => row!(simd, [T: (Copy + PartialOrd)] |x: T, y: T| -> u8 { (x <= y) as u8 }),
    }
}

fn binary_float<T: Math + 'static>(op: Binary, simd: Simd) -> Option<StepFn> {
    use Binary::*;
    rows! { simd, op, T: Math;
        Add => |x, y| x + y;
        Sub => |x, y| x - y;
        Mul => |x, y| x * y;
        Div => |x, y| x / y;
        Rem => |x, y| Math::rem(x, y);
        Pow => |x, y| Math::pow(x, y);
        Atan2 => |x, y| Math::atan2(x, y);
        Max => |x, y| Math::max(x, y);
        Min => |x, y| Math::min(x, y);
    }
}

fn binary_int<T: Int + 'static>(op: Binary, simd: Simd) -> Option<StepFn> {
    use Binary::*;
    rows! { simd, op, T: Int;
        Add => |x, y| x.add(y);
        Sub => |x, y| x.sub(y);
        Mul => |x, y| x.mul(y);
        Div => |x, y| x.div(y);
        Rem => |x, y| x.rem(y);
        Pow => |x, y| x.pow(y);
        Max => |x, y| Int::max(x, y);
        Min => |x, y| Int::min(x, y);
        And => |x, y| x.and(y);
        Or => |x, y| x.or(y);
        Xor => |x, y| x.xor(y);
        Shl => |x, y| x.shl(y);
        Shr => |x, y| x.shr(y);
    }
}

/// The forms of an FMA: a product and a sum, rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pointwise) enum FmaKind {
    /// The sum `a·b + c`.
    MulAdd,
    /// The difference `a·b − c`.
    MulSub,
    /// The difference `c − a·b`.
    NegMulAdd,
}

/// The FMA step, for floats.
pub(in crate::pointwise) fn fused(op: FmaKind, t: DType, simd: Simd) -> StepFn {
    if t == DType::F64 { fused_float::<f64>(op, simd) } else { fused_float::<f32>(op, simd) }
}

fn fused_float<T: Math>(op: FmaKind, simd: Simd) -> StepFn {
    match op {
        FmaKind::MulAdd => row!(simd, [T: (Math)] |a: T, b: T, c: T| -> T { a.mul_add(b, c) }),
        FmaKind::MulSub => row!(simd, [T: (Math)] |a: T, b: T, c: T| -> T { a.mul_add(b, -c) }),
        FmaKind::NegMulAdd => row!(simd, [T: (Math)] |a: T, b: T, c: T| -> T { (-a).mul_add(b, c) }),
    }
}

/// Selects `a` where the byte `c` is not 0, `b` elsewhere, bit for bit. Operands: `c`, `a`, `b`.
pub(in crate::pointwise) fn select(t: DType, simd: Simd) -> StepFn {
    match t.size() {
        1 => choice::<u8>(simd),
        4 => choice::<u32>(simd),
        _ => choice::<u64>(simd),
    }
}

fn choice<T: Copy>(simd: Simd) -> StepFn {
    row!(simd, [T: (Copy)] |c: u8, a: T, b: T| -> T { if c != 0 { a } else { b } })
}

/// The step that copies elements of a size in bytes.
pub(in crate::pointwise) fn raw_copy(size: usize, simd: Simd) -> StepFn {
    match size {
        1 => copy::<u8>(simd),
        2 => copy::<u16>(simd),
        4 => copy::<u32>(simd),
        _ => copy::<u64>(simd),
    }
}

/// The step from stored form to compute form; `None` when they are equal.
pub(in crate::pointwise) fn widen(t: DType, simd: Simd) -> Option<StepFn> {
    match t {
        DType::F16 => Some(map1::<u16, f32, narrow::Of<narrow::F16>>(simd)),
        DType::BF16 => Some(map1::<u16, f32, narrow::Of<narrow::Bf16>>(simd)),
        DType::F8E4M3 => Some(map1::<u8, f32, narrow::Of<E4M3>>(simd)),
        DType::F8E5M2 => Some(map1::<u8, f32, narrow::Of<E5M2>>(simd)),
        _ => None,
    }
}

/// The step from compute form to stored form.
pub(in crate::pointwise) fn store(t: DType, simd: Simd) -> StepFn {
    match t {
        DType::F16 => map1::<f32, u16, narrow::Rounded<narrow::F16>>(simd),
        DType::BF16 => map1::<f32, u16, narrow::Rounded<narrow::Bf16>>(simd),
        DType::F8E4M3 => map1::<f32, u8, narrow::Rounded<E4M3>>(simd),
        DType::F8E5M2 => map1::<f32, u8, narrow::Rounded<E5M2>>(simd),
        _ => raw_copy(t.size(), simd),
    }
}

/// Accumulates a value in compute form into a stored one: a sum, or the logical or of `bool`.
pub(in crate::pointwise) fn add_into(t: DType, simd: Simd) -> StepFn {
    struct OrBool;
    impl Map2<u8, u8, u8> for OrBool {
        #[inline(always)]
        fn f(d: u8, a: u8) -> u8 {
            d | a
        }
    }
    fn sum<T: Lane>(simd: Simd) -> StepFn {
        fold::<T, T, Sum>(simd)
    }
    match t {
        DType::F16 => fold::<f32, u16, narrow::Of<narrow::F16>>(simd),
        DType::BF16 => fold::<f32, u16, narrow::Of<narrow::Bf16>>(simd),
        DType::F8E4M3 => fold::<f32, u8, narrow::Of<E4M3>>(simd),
        DType::F8E5M2 => fold::<f32, u8, narrow::Of<E5M2>>(simd),
        DType::Bool => fold::<u8, u8, OrBool>(simd),
        DType::F32 => sum::<f32>(simd),
        DType::F64 => sum::<f64>(simd),
        DType::I32 => sum::<i32>(simd),
        DType::I64 => sum::<i64>(simd),
        DType::U32 => sum::<u32>(simd),
        DType::U8 => sum::<u8>(simd),
    }
}

/// Random bits; see [`random`].
pub(in crate::pointwise) fn random_bits(simd: Simd) -> StepFn {
    random(simd)
}

/// The cast from one dtype to another, in compute form: values cast to a narrower float are rounded. `None` when nothing
/// changes.
///
/// Floats to integers truncate and saturate, integers wrap, `bool` is whether the value is not 0.
pub(in crate::pointwise) fn cast(from: DType, to: DType, simd: Simd) -> Option<StepFn> {
    if from == to || (from.compute() == DType::F32 && to == DType::F32) {
        return None;
    }
    match to {
        DType::F16 => Some(by_lane!(from, T => to_narrow::<T, narrow::F16>(simd))),
        DType::BF16 => Some(by_lane!(from, T => to_narrow::<T, narrow::Bf16>(simd))),
        DType::F8E4M3 => Some(by_lane!(from, T => to_narrow::<T, E4M3>(simd))),
        DType::F8E5M2 => Some(by_lane!(from, T => to_narrow::<T, E5M2>(simd))),
        DType::Bool => Some(by_lane!(from, T => to_bool::<T>(simd))),
        _ => Some(by_lane!(from, T => from_type::<T>(to, simd))),
    }
}

/// Conversion by Rust's `as`.
trait As<D> {
    fn to(self) -> D;
}

macro_rules! casts {
    ($($a:ident)*) => { $(casts!(@ $a: f32 f64 i32 i64 u32 u8);)* };
    (@ $a:ident: $($d:ident)*) => {$(
        impl As<$d> for $a {
            #[inline(always)]
            fn to(self) -> $d { self as $d }
        }
    )*};
}
casts!(f32 f64 i32 i64 u32 u8);

fn from_type<T>(to: DType, simd: Simd) -> StepFn
where
    T: Copy + As<f32> + As<f64> + As<i32> + As<i64> + As<u32> + As<u8>,
{
    fn convert<A: Copy + As<D>, D: Copy>(simd: Simd) -> StepFn {
        row!(simd, [A: (Copy + As<D>), D: (Copy)] |x: A| -> D { x.to() })
    }
    match to {
        DType::F32 => convert::<T, f32>(simd),
        DType::F64 => convert::<T, f64>(simd),
        DType::I32 => convert::<T, i32>(simd),
        DType::I64 => convert::<T, i64>(simd),
        DType::U32 => convert::<T, u32>(simd),
        _ => convert::<T, u8>(simd),
    }
}

fn to_narrow<T: Copy + As<f32>, H: narrow::Narrow>(simd: Simd) -> StepFn {
    struct Row<H>(H);
    impl<T: As<f32>, H: narrow::Narrow> Map1<T, f32> for Row<H> {
        #[inline(always)]
        fn f(x: T) -> f32 {
            H::widen(H::round(x.to()))
        }
    }
    map1::<T, f32, Row<H>>(simd)
}

fn to_bool<T: Lane>(simd: Simd) -> StepFn {
    row!(simd, [T: (Lane)] |x: T| -> u8 { (x != T::ZERO) as u8 })
}
