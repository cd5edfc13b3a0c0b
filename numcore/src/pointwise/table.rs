//! The table of elementwise ops, one row each: its name, its dtypes, its value on the host (the reference), and its
//! source in each dialect.
//!
//! A new op needs a row here, a row in `derive.rs`, and a lane function in each runtime that does not print programs.

use std::cmp::Ordering::{Equal, Greater, Less};

use super::reference::{Does1, Does2, Number, max, min, power, rem, sign, whole_rem};
use crate::DType;

/// The class of dtypes that an op takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpClass {
    /// Floating dtypes only.
    Float,
    /// Floating and integer dtypes.
    Number,
    /// Integer dtypes only.
    Int,
    /// Integer dtypes and `bool`.
    Bits,
    /// `bool` only.
    Bool,
    /// Any dtype that is computed in, `bool` included.
    Any,
}

impl OpClass {
    /// Tells whether `dtype` is in the class.
    pub const fn takes(self, dtype: DType) -> bool {
        match self {
            OpClass::Float => dtype.is_float(),
            OpClass::Number => dtype.is_float() || dtype.is_int(),
            OpClass::Int => dtype.is_int(),
            OpClass::Bits => dtype.is_int() || matches!(dtype, DType::Bool),
            OpClass::Bool => matches!(dtype, DType::Bool),
            OpClass::Any => !dtype.is_storage(),
        }
    }
}

/// The languages a program can be printed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Rust, for programs compiled into the CPU runtime.
    Rust,
    /// CUDA C, for NVIDIA GPUs.
    Cuda,
    /// WGSL, WebGPU's shading language.
    Wgsl,
}

/// The source of an op in one dialect: on floats, on integers, on `bool`; the last entry also serves missing ones.
/// `{0}`, `{1}` are the operands, `{t}` their type in the dialect, `{u}` its unsigned counterpart, `{d}` the
/// [`DType`]'s name.
pub(super) type DialectCell = &'static [&'static str];

macro_rules! ops {
    ($Enum:ident, $Does:ident: $about:literal; $($(#[$doc:meta])* $op:ident $name:literal $class:ident($($does:tt)*) [$rust:expr, $cuda:expr, $wgsl:expr];)*) => {
        #[doc = $about]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $Enum { $($(#[$doc])* $op,)* }

        impl $Enum {
            /// All ops, in declaration order.
            pub const ALL: &'static [$Enum] = &[$($Enum::$op,)*];

            /// The name of the op in messages and printed programs.
            pub const fn name(self) -> &'static str {
                match self { $($Enum::$op => $name,)* }
            }

            /// The class of dtypes that the op takes.
            pub const fn class(self) -> OpClass {
                match self { $($Enum::$op => ops!(@class $class),)* }
            }

            pub(super) fn does(self) -> $Does {
                match self { $($Enum::$op => $Does::$class($($does)*),)* }
            }

            pub(super) const fn cell(self, dialect: Dialect) -> DialectCell {
                let cells: [DialectCell; 3] = match self { $($Enum::$op => [&$rust, &$cuda, &$wgsl],)* };
                cells[dialect as usize]
            }
        }
    };
    (@class Same) => { OpClass::Any };
    (@class Order) => { OpClass::Number };
    (@class $class:ident) => { OpClass::$class };
}

ops! { Unary, Does1: "Ops of one operand.";
    /// The negation `−x`, elementwise.
    Neg "neg" Number(|x| -x, i64::wrapping_neg) [["-{0}", "Int::neg({0})"], ["-{0}", "({t})(0 - ({u}){0})"], ["-{0}", "{t}(0) - {0}"]];
    /// The absolute value `|x|`, elementwise.
    Abs "abs" Number(f64::abs, i64::wrapping_abs) [["{0}.abs()", "Int::abs({0})"], ["fabs({0})", "wg_abs({0})"], ["abs({0})"]];
    /// The sign: −1, 0 or 1; NaN is kept.
    Sign "sign" Number(sign, i64::signum) [["Math::sign({0})", "Int::sign({0})"], ["wg_sign({0})"], ["wg_sign_{d}({0})"]];
    /// The exponential `eˣ`, elementwise.
    Exp "exp" Float(libm::exp) [["Math::exp({0})"], ["exp({0})"], ["wg_exp({0})"]];
    /// The exponential minus one, `eˣ − 1`, accurate near 0.
    Expm1 "expm1" Float(libm::expm1) [["Math::expm1({0})"], ["expm1({0})"], ["wg_expm1({0})"]];
    /// The power of two `2ˣ`, elementwise.
    Exp2 "exp2" Float(libm::exp2) [["Math::exp2({0})"], ["wg_exp2({0})"], ["wg_exp2({0})"]];
    /// The natural logarithm `ln x`, elementwise.
    Log "log" Float(libm::log) [["Math::log({0})"], ["log({0})"], ["wg_log({0})"]];
    /// The logarithm `ln(1 + x)`, accurate near 0.
    Log1p "log1p" Float(libm::log1p) [["Math::log1p({0})"], ["log1p({0})"], ["wg_log1p({0})"]];
    /// The logarithm to base 2.
    Log2 "log2" Float(libm::log2) [["Math::log2({0})"], ["log2({0})"], ["wg_log2({0})"]];
    /// The square root `√x`, elementwise.
    Sqrt "sqrt" Float(f64::sqrt) [["{0}.sqrt()"], ["sqrt({0})"], ["wg_sqrt({0})"]];
    /// The reciprocal square root `1/√x`, elementwise.
    Rsqrt "rsqrt" Float(|x| 1.0 / x.sqrt()) [["Math::rsqrt({0})"], ["rsqrt({0})"], ["{t}(1) / wg_sqrt({0})"]];
    /// The reciprocal `1/x`, elementwise.
    Recip "recip" Float(f64::recip) [["Math::recip({0})"], ["({t})1 / {0}"], ["{t}(1) / {0}"]];
    /// The sine of an angle in radians.
    Sin "sin" Float(libm::sin) [["Math::sin({0})"], ["sin({0})"], ["wg_sin({0})"]];
    /// The cosine of an angle in radians.
    Cos "cos" Float(libm::cos) [["Math::cos({0})"], ["cos({0})"], ["wg_cos({0})"]];
    /// The tangent of an angle in radians.
    Tan "tan" Float(libm::tan) [["Math::tan({0})"], ["wg_tan({0})"], ["wg_tan({0})"]];
    /// The inverse sine, in radians.
    Asin "asin" Float(libm::asin) [["Math::asin({0})"], ["asin({0})"], ["wg_asin({0})"]];
    /// The inverse cosine, in radians.
    Acos "acos" Float(libm::acos) [["Math::acos({0})"], ["acos({0})"], ["wg_acos({0})"]];
    /// The inverse tangent, in radians.
    Atan "atan" Float(libm::atan) [["Math::atan({0})"], ["atan({0})"], ["wg_atan({0})"]];
    /// The hyperbolic sine, elementwise.
    Sinh "sinh" Float(libm::sinh) [["Math::sinh({0})"], ["sinh({0})"], ["wg_sinh({0})"]];
    /// The hyperbolic cosine, elementwise.
    Cosh "cosh" Float(libm::cosh) [["Math::cosh({0})"], ["cosh({0})"], ["wg_cosh({0})"]];
    /// The hyperbolic tangent, elementwise.
    Tanh "tanh" Float(libm::tanh) [["Math::tanh({0})"], ["tanh({0})"], ["wg_tanh({0})"]];
    /// The Gauss error function `erf(x)`, elementwise.
    Erf "erf" Float(libm::erf) [["Math::erf({0})"], ["erf({0})"], ["wg_erf({0})"]];
    /// The complementary error function `1 − erf(x)`, accurate where it is small.
    Erfc "erfc" Float(libm::erfc) [["Math::erfc({0})"], ["wg_erfc({0})"], ["wg_erfc({0})"]];
    /// The floor: the largest integer not above the operand.
    Floor "floor" Float(f64::floor) [["{0}.floor()"], ["floor({0})"], ["floor({0})"]];
    /// The ceiling: the smallest integer not below the operand.
    Ceil "ceil" Float(f64::ceil) [["{0}.ceil()"], ["ceil({0})"], ["ceil({0})"]];
    /// The nearest integer, ties to even.
    Round "round" Float(f64::round_ties_even) [["{0}.round_ties_even()"], ["rint({0})"], ["round({0})"]];
    /// The integer part of `x`: rounding towards zero.
    Trunc "trunc" Float(f64::trunc) [["{0}.trunc()"], ["trunc({0})"], ["trunc({0})"]];
    /// Logical negation of `bool` elements.
    Not "not" Bool(|x| !x) [["!{0}"], ["!{0}"], ["!{0}"]];
}

ops! { Binary, Does2: "Ops of two operands.";
    /// The sum `a + b`, elementwise.
    Add "add" Number(|a, b| a + b, i64::wrapping_add)
        [["{0} + {1}", "Int::add({0}, {1})"], ["{0} + {1}", "({t})(({u}){0} + ({u}){1})"], ["{0} + {1}"]];
    /// The difference `a − b`, elementwise.
    Sub "sub" Number(|a, b| a - b, i64::wrapping_sub)
        [["{0} - {1}", "Int::sub({0}, {1})"], ["{0} - {1}", "({t})(({u}){0} - ({u}){1})"], ["{0} - {1}"]];
    /// The elementwise product `a · b`.
    Mul "mul" Number(|a, b| a * b, i64::wrapping_mul)
        [["{0} * {1}", "Int::mul({0}, {1})"], ["{0} * {1}", "({t})(({u}){0} * ({u}){1})"], ["{0} * {1}"]];
    /// The quotient `a / b`; integers truncate, and give 0 where `b` is 0.
    Div "div" Number(|a, b| a / b, |a, b| if b == 0 { 0 } else { a.wrapping_div(b) })
        [["{0} / {1}", "Int::div({0}, {1})"], ["{0} / {1}", "wg_div({0}, {1})"], ["{0} / {1}", "wg_div_{d}({0}, {1})"]];
    /// The remainder with the sign of `b`; of integers, 0 where `b` is 0.
    Rem "rem" Number(rem, whole_rem)
        [["Math::rem({0}, {1})", "Int::rem({0}, {1})"], ["wg_rem({0}, {1})"], ["wg_rem_{d}({0}, {1})"]];
    /// The power `aᵇ`; an integer to a negative power is 0, except for 1 and −1.
    Pow "pow" Number(libm::pow, power)
        [["Math::pow({0}, {1})", "Int::pow({0}, {1})"], ["pow({0}, {1})", "wg_pow({0}, {1})"], ["wg_pow_{d}({0}, {1})"]];
    /// The angle of the point `(b, a)`, in radians.
    Atan2 "atan2" Float(libm::atan2) [["Math::atan2({0}, {1})"], ["atan2({0}, {1})"], ["wg_atan2({0}, {1})"]];
    /// The larger of two elements; NaN wins.
    Max "max" Number(max, i64::max)
        [["Math::max({0}, {1})", "Int::max({0}, {1})"], ["wg_max({0}, {1})"], ["wg_max({0}, {1})", "max({0}, {1})"]];
    /// The smaller of two elements; NaN wins.
    Min "min" Number(min, i64::min)
        [["Math::min({0}, {1})", "Int::min({0}, {1})"], ["wg_min({0}, {1})"], ["wg_min({0}, {1})", "min({0}, {1})"]];
    /// Bitwise and of integers, logical and of `bool`.
    And "and" Bits(|a, b| a & b) [["{0} & {1}"], ["{0} & {1}"], ["{0} & {1}"]];
    /// Bitwise or of integers, logical or of `bool`.
    Or "or" Bits(|a, b| a | b) [["{0} | {1}"], ["{0} | {1}"], ["{0} | {1}"]];
    /// Bitwise exclusive or of integers, logical exclusive or of `bool`.
    Xor "xor" Bits(|a, b| a ^ b) [["{0} ^ {1}"], ["{0} ^ {1}"], ["{0} ^ {1}", "{0} ^ {1}", "{0} != {1}"]];
    /// A left shift by `b` modulo the width.
    Shl "shl" Int(|a, b, bits| a.wrapping_shl(b as u32 % bits))
        [["Int::shl({0}, {1})"], ["wg_shl({0}, {1})"], ["wg_shl_{d}({0}, {1})"]];
    /// A right shift by `b` modulo the width; arithmetic for signed integers.
    Shr "shr" Int(|a, b, bits| a.wrapping_shr(b as u32 % bits))
        [["Int::shr({0}, {1})"], ["wg_shr({0}, {1})"], ["wg_shr_{d}({0}, {1})"]];
    /// Elementwise equality `a == b`, a `bool`.
    Eq "eq" Same(|o| o == Some(Equal)) [["{0} == {1}"], ["{0} == {1}"], ["{0} == {1}"]];
    /// Elementwise inequality `a != b`, a `bool`.
    Ne "ne" Same(|o| o != Some(Equal)) [["{0} != {1}"], ["{0} != {1}"], ["!({0} == {1})"]];
    /// The comparison `a < b`, a `bool`.
    Lt "lt" Order(|o| o == Some(Less)) [["{0} < {1}"], ["{0} < {1}"], ["{0} < {1}"]];
    /// The comparison `a ≤ b`, a `bool`.
    Le "le" Order(|o| o.is_some_and(|o| o != Greater)) [["{0} <= {1}"], ["{0} <= {1}"], ["{0} <= {1}"]];
}

impl Binary {
    /// Tells whether the result is `bool` for operands of every dtype.
    pub const fn is_comparison(self) -> bool {
        matches!(self, Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le)
    }

    /// Tells whether exchanging the operands changes no bit of the result (except the payload of a NaN).
    ///
    /// [`Max`](Binary::Max) and [`Min`](Binary::Min) do not commute: for `0` and `−0` they return the second operand.
    pub(crate) const fn commutes(self) -> bool {
        use Binary::*;
        matches!(self, Add | Mul | And | Or | Xor | Eq | Ne)
    }
}

impl Unary {
    /// The result of the op on the host, the reference. The operand and the result have a dtype of the op's
    /// [`class`](Unary::class).
    pub fn eval(self, x: Number) -> Number {
        self.does().apply(x)
    }
}

impl Binary {
    /// The result of the op on the host, the reference. Operands have one dtype; `bits` is its width, for shifts.
    pub fn eval(self, a: Number, b: Number, bits: u32) -> Number {
        self.does().apply(a, b, bits)
    }
}
