//! Every elementwise op, one row each: its name, what it does to which types (the reference), and how each dialect writes it.
//!
//! Adding an op is a row here, a row in `derive.rs`, and a lane function in each runtime that does not print.

use std::cmp::Ordering::{Equal, Greater, Less};

use super::reference::{Does1, Does2, Number, max, min, power, rem, sign, whole_rem};
use crate::DType;

/// Which types an op takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpClass {
    /// Floats.
    Float,
    /// Floats and integers.
    Number,
    /// Integers.
    Int,
    /// Integers and `bool`.
    Bits,
    /// `bool`.
    Bool,
    /// Anything.
    Any,
}

impl OpClass {
    /// Whether `dtype` is among them.
    pub const fn takes(self, dtype: DType) -> bool {
        match self {
            OpClass::Float => dtype.is_float(),
            OpClass::Number => dtype.is_float() || dtype.is_int(),
            OpClass::Int => dtype.is_int(),
            OpClass::Bits => dtype.is_int() || matches!(dtype, DType::Bool),
            OpClass::Bool => matches!(dtype, DType::Bool),
            OpClass::Any => true,
        }
    }
}

/// The languages a program can be printed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Rust, for programs compiled into the CPU runtime.
    Rust,
    /// CUDA C.
    Cuda,
    /// WebGPU's shading language.
    Wgsl,
}

/// How one dialect writes an op: on floats, on integers, on `bool`; the last entry stands for those not given.
/// `{0}`, `{1}` are the operands, `{t}` their type in the dialect, `{u}` its unsigned counterpart, `{d}` its [`DType`]'s name.
pub(super) type DialectCell = &'static [&'static str];

macro_rules! ops {
    ($Enum:ident, $Does:ident: $about:literal; $($(#[$doc:meta])* $op:ident $name:literal $class:ident($($does:tt)*) [$rust:expr, $cuda:expr, $wgsl:expr];)*) => {
        #[doc = $about]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $Enum { $($(#[$doc])* $op,)* }

        impl $Enum {
            /// Every one, in declaration order.
            pub const ALL: &'static [$Enum] = &[$($Enum::$op,)*];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $($Enum::$op => $name,)* }
            }

            /// What it takes.
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
    /// `−x`.
    Neg "neg" Number(|x| -x, i64::wrapping_neg) [["-{0}", "Int::neg({0})"], ["-{0}", "({t})(0 - ({u}){0})"], ["-{0}", "{t}(0) - {0}"]];
    /// `|x|`.
    Abs "abs" Number(f64::abs, i64::wrapping_abs) [["{0}.abs()", "Int::abs({0})"], ["fabs({0})", "wg_abs({0})"], ["abs({0})"]];
    /// −1, 0 or 1; NaN stays.
    Sign "sign" Number(sign, i64::signum) [["Math::sign({0})", "Int::sign({0})"], ["wg_sign({0})"], ["wg_sign_{d}({0})"]];
    /// `eˣ`.
    Exp "exp" Float(libm::exp) [["Math::exp({0})"], ["exp({0})"], ["wg_exp({0})"]];
    /// `eˣ − 1`.
    Expm1 "expm1" Float(libm::expm1) [["Math::expm1({0})"], ["expm1({0})"], ["wg_expm1({0})"]];
    /// `2ˣ`.
    Exp2 "exp2" Float(libm::exp2) [["Math::exp2({0})"], ["exp2({0})"], ["wg_exp2({0})"]];
    /// Natural logarithm.
    Log "log" Float(libm::log) [["Math::log({0})"], ["log({0})"], ["wg_log({0})"]];
    /// `ln(1 + x)`.
    Log1p "log1p" Float(libm::log1p) [["Math::log1p({0})"], ["log1p({0})"], ["wg_log1p({0})"]];
    /// Logarithm to base 2.
    Log2 "log2" Float(libm::log2) [["Math::log2({0})"], ["log2({0})"], ["wg_log2({0})"]];
    /// Square root.
    Sqrt "sqrt" Float(f64::sqrt) [["{0}.sqrt()"], ["sqrt({0})"], ["wg_sqrt({0})"]];
    /// `1/√x`.
    Rsqrt "rsqrt" Float(|x| 1.0 / x.sqrt()) [["Math::rsqrt({0})"], ["rsqrt({0})"], ["{t}(1) / wg_sqrt({0})"]];
    /// `1/x`.
    Recip "recip" Float(f64::recip) [["Math::recip({0})"], ["({t})1 / {0}"], ["{t}(1) / {0}"]];
    /// Sine.
    Sin "sin" Float(libm::sin) [["Math::sin({0})"], ["sin({0})"], ["wg_sin({0})"]];
    /// Cosine.
    Cos "cos" Float(libm::cos) [["Math::cos({0})"], ["cos({0})"], ["wg_cos({0})"]];
    /// Tangent.
    Tan "tan" Float(libm::tan) [["Math::tan({0})"], ["wg_tan({0})"], ["wg_tan({0})"]];
    /// Inverse sine.
    Asin "asin" Float(libm::asin) [["Math::asin({0})"], ["asin({0})"], ["wg_asin({0})"]];
    /// Inverse cosine.
    Acos "acos" Float(libm::acos) [["Math::acos({0})"], ["acos({0})"], ["wg_acos({0})"]];
    /// Inverse tangent.
    Atan "atan" Float(libm::atan) [["Math::atan({0})"], ["atan({0})"], ["wg_atan({0})"]];
    /// Hyperbolic sine.
    Sinh "sinh" Float(libm::sinh) [["Math::sinh({0})"], ["sinh({0})"], ["wg_sinh({0})"]];
    /// Hyperbolic cosine.
    Cosh "cosh" Float(libm::cosh) [["Math::cosh({0})"], ["cosh({0})"], ["wg_cosh({0})"]];
    /// Hyperbolic tangent.
    Tanh "tanh" Float(libm::tanh) [["Math::tanh({0})"], ["tanh({0})"], ["wg_tanh({0})"]];
    /// The error function.
    Erf "erf" Float(libm::erf) [["Math::erf({0})"], ["erf({0})"], ["wg_erf({0})"]];
    /// `1 − erf(x)`, accurate where it is small.
    Erfc "erfc" Float(libm::erfc) [["Math::erfc({0})"], ["erfc({0})"], ["wg_erfc({0})"]];
    /// Largest whole number not above.
    Floor "floor" Float(f64::floor) [["{0}.floor()"], ["floor({0})"], ["floor({0})"]];
    /// Smallest whole number not below.
    Ceil "ceil" Float(f64::ceil) [["{0}.ceil()"], ["ceil({0})"], ["ceil({0})"]];
    /// Nearest whole number, ties to even.
    Round "round" Float(f64::round_ties_even) [["{0}.round_ties_even()"], ["rint({0})"], ["round({0})"]];
    /// The whole part.
    Trunc "trunc" Float(f64::trunc) [["{0}.trunc()"], ["trunc({0})"], ["trunc({0})"]];
    /// Not.
    Not "not" Bool(|x| !x) [["!{0}"], ["!{0}"], ["!{0}"]];
}

ops! { Binary, Does2: "Ops of two operands.";
    /// `a + b`.
    Add "add" Number(|a, b| a + b, i64::wrapping_add)
        [["{0} + {1}", "Int::add({0}, {1})"], ["{0} + {1}", "({t})(({u}){0} + ({u}){1})"], ["{0} + {1}"]];
    /// `a − b`.
    Sub "sub" Number(|a, b| a - b, i64::wrapping_sub)
        [["{0} - {1}", "Int::sub({0}, {1})"], ["{0} - {1}", "({t})(({u}){0} - ({u}){1})"], ["{0} - {1}"]];
    /// `a · b`.
    Mul "mul" Number(|a, b| a * b, i64::wrapping_mul)
        [["{0} * {1}", "Int::mul({0}, {1})"], ["{0} * {1}", "({t})(({u}){0} * ({u}){1})"], ["{0} * {1}"]];
    /// `a / b`; of integers truncated, and 0 where `b` is 0.
    Div "div" Number(|a, b| a / b, |a, b| if b == 0 { 0 } else { a.wrapping_div(b) })
        [["{0} / {1}", "Int::div({0}, {1})"], ["{0} / {1}", "wg_div({0}, {1})"], ["{0} / {1}", "wg_div_{d}({0}, {1})"]];
    /// Remainder with the sign of `b`; of integers 0 where `b` is 0.
    Rem "rem" Number(rem, whole_rem)
        [["Math::rem({0}, {1})", "Int::rem({0}, {1})"], ["wg_rem({0}, {1})"], ["wg_rem_{d}({0}, {1})"]];
    /// `aᵇ`; of integers to a negative power 0, except for 1 and −1.
    Pow "pow" Number(libm::pow, power)
        [["Math::pow({0}, {1})", "Int::pow({0}, {1})"], ["pow({0}, {1})", "wg_pow({0}, {1})"], ["wg_pow_{d}({0}, {1})"]];
    /// Angle of the point `(b, a)`.
    Atan2 "atan2" Float(libm::atan2) [["Math::atan2({0}, {1})"], ["atan2({0}, {1})"], ["wg_atan2({0}, {1})"]];
    /// The larger; NaN wins.
    Max "max" Number(max, i64::max)
        [["Math::max({0}, {1})", "Int::max({0}, {1})"], ["wg_max({0}, {1})"], ["wg_max({0}, {1})", "max({0}, {1})"]];
    /// The smaller; NaN wins.
    Min "min" Number(min, i64::min)
        [["Math::min({0}, {1})", "Int::min({0}, {1})"], ["wg_min({0}, {1})"], ["wg_min({0}, {1})", "min({0}, {1})"]];
    /// And.
    And "and" Bits(|a, b| a & b) [["{0} & {1}"], ["{0} & {1}"], ["{0} & {1}"]];
    /// Or.
    Or "or" Bits(|a, b| a | b) [["{0} | {1}"], ["{0} | {1}"], ["{0} | {1}"]];
    /// Exclusive or.
    Xor "xor" Bits(|a, b| a ^ b) [["{0} ^ {1}"], ["{0} ^ {1}"], ["{0} ^ {1}", "{0} ^ {1}", "{0} != {1}"]];
    /// Shifted left by `b` modulo the width.
    Shl "shl" Int(|a, b, bits| a.wrapping_shl(b as u32 % bits))
        [["Int::shl({0}, {1})"], ["wg_shl({0}, {1})"], ["wg_shl_{d}({0}, {1})"]];
    /// Shifted right by `b` modulo the width; a signed number keeps its sign.
    Shr "shr" Int(|a, b, bits| a.wrapping_shr(b as u32 % bits))
        [["Int::shr({0}, {1})"], ["wg_shr({0}, {1})"], ["wg_shr_{d}({0}, {1})"]];
    /// `a == b`.
    Eq "eq" Same(|o| o == Some(Equal)) [["{0} == {1}"], ["{0} == {1}"], ["{0} == {1}"]];
    /// `a != b`.
    Ne "ne" Same(|o| o != Some(Equal)) [["{0} != {1}"], ["{0} != {1}"], ["!({0} == {1})"]];
    /// `a < b`.
    Lt "lt" Order(|o| o == Some(Less)) [["{0} < {1}"], ["{0} < {1}"], ["{0} < {1}"]];
    /// `a ≤ b`.
    Le "le" Order(|o| o.is_some_and(|o| o != Greater)) [["{0} <= {1}"], ["{0} <= {1}"], ["{0} <= {1}"]];
}

impl Binary {
    /// Whether its result is `bool` whatever its operands are.
    pub const fn is_comparison(self) -> bool {
        matches!(self, Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le)
    }

    /// Whether the operands can be exchanged without a change in any bit (but the payload of a NaN).
    ///
    /// Not so [`Max`](Binary::Max) and [`Min`](Binary::Min): of `0` and `−0` they give the second.
    pub const fn commutes(self) -> bool {
        use Binary::*;
        matches!(self, Add | Mul | And | Or | Xor | Eq | Ne)
    }
}

impl Unary {
    /// Its value on the host, the reference: `x` has an element type of [`class`](Unary::class), and so has the result.
    pub fn eval(self, x: Number) -> Number {
        self.does().apply(x)
    }
}

impl Binary {
    /// Its value on the host, the reference. Operands have one type; `bits` is its width, for shifts.
    pub fn eval(self, a: Number, b: Number, bits: u32) -> Number {
        self.does().apply(a, b, bits)
    }
}
