//! Every elementwise op, one row each: its name, what it takes, its reference on the host, and how each dialect writes it.
//!
//! Adding an op is a row here, a row in `derive.rs`, and a lane function in each runtime that does not print.

/// Which types an op takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
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

macro_rules! table {
    (
        unary { $($(#[$ud:meta])* $uv:ident $un:literal $uc:ident $uf:expr, $ut:expr;)* }
        binary { $($(#[$bd:meta])* $bv:ident $bn:literal $bc:ident $bf:expr, $bt:expr;)* }
    ) => {
        /// Ops of one operand.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Unary { $($(#[$ud])* $uv,)* }

        impl Unary {
            /// Every one, in declaration order.
            pub const ALL: &'static [Unary] = &[$(Unary::$uv,)*];
            /// Its name.
            pub const fn name(self) -> &'static str { match self { $(Unary::$uv => $un,)* } }
            /// What it takes.
            pub const fn class(self) -> Class { match self { $(Unary::$uv => Class::$uc,)* } }
            /// Its value in `f64`: the reference, and what runs for parts that depend on scalars alone.
            pub fn eval(self, x: f64) -> f64 { match self { $(Unary::$uv => { let f: fn(f64) -> f64 = $uf; f(x) })* } }
            /// How a dialect writes it, `{0}` standing for the operand.
            pub const fn template(self, dialect: Dialect) -> &'static str {
                let columns: [&'static str; 3] = match self { $(Unary::$uv => $ut,)* };
                columns[dialect as usize]
            }
        }

        /// Ops of two operands.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Binary { $($(#[$bd])* $bv,)* }

        impl Binary {
            /// Every one, in declaration order.
            pub const ALL: &'static [Binary] = &[$(Binary::$bv,)*];
            /// Its name.
            pub const fn name(self) -> &'static str { match self { $(Binary::$bv => $bn,)* } }
            /// What it takes.
            pub const fn class(self) -> Class { match self { $(Binary::$bv => Class::$bc,)* } }
            /// Its value in `f64`; comparisons give 0 or 1.
            pub fn eval(self, a: f64, b: f64) -> f64 { match self { $(Binary::$bv => { let f: fn(f64, f64) -> f64 = $bf; f(a, b) })* } }
            /// How a dialect writes it, `{0}` and `{1}` standing for the operands.
            pub const fn template(self, dialect: Dialect) -> &'static str {
                let columns: [&'static str; 3] = match self { $(Binary::$bv => $bt,)* };
                columns[dialect as usize]
            }
        }
    };
}

const fn same(t: &'static str) -> [&'static str; 3] {
    [t, t, t]
}

table! {
    unary {
        /// `−x`.
        Neg "neg" Number |x| -x, same("-{0}");
        /// `|x|`.
        Abs "abs" Number f64::abs, ["{0}.abs()", "wg_abs({0})", "abs({0})"];
        /// −1, 0 or 1; NaN stays.
        Sign "sign" Number |x| if x == 0.0 || x.is_nan() { x } else { x.signum() }, ["{0}.sign()", "wg_sign({0})", "wg_sign({0})"];
        /// `eˣ`.
        Exp "exp" Float f64::exp, ["{0}.exp()", "exp({0})", "exp({0})"];
        /// `eˣ − 1`.
        Expm1 "expm1" Float f64::exp_m1, ["{0}.expm1()", "expm1({0})", "wg_expm1({0})"];
        /// `2ˣ`.
        Exp2 "exp2" Float f64::exp2, ["{0}.exp2()", "exp2({0})", "exp2({0})"];
        /// Natural logarithm.
        Log "log" Float f64::ln, ["{0}.log()", "log({0})", "log({0})"];
        /// `ln(1 + x)`.
        Log1p "log1p" Float f64::ln_1p, ["{0}.log1p()", "log1p({0})", "wg_log1p({0})"];
        /// Logarithm to base 2.
        Log2 "log2" Float f64::log2, ["{0}.log2()", "log2({0})", "log2({0})"];
        /// Square root.
        Sqrt "sqrt" Float f64::sqrt, ["{0}.sqrt()", "sqrt({0})", "sqrt({0})"];
        /// `1/√x`.
        Rsqrt "rsqrt" Float |x| 1.0 / x.sqrt(), ["{0}.rsqrt()", "rsqrt({0})", "inverseSqrt({0})"];
        /// `1/x`.
        Recip "recip" Float f64::recip, same("1 / {0}");
        /// Sine.
        Sin "sin" Float f64::sin, ["{0}.sin()", "sin({0})", "sin({0})"];
        /// Cosine.
        Cos "cos" Float f64::cos, ["{0}.cos()", "cos({0})", "cos({0})"];
        /// Tangent.
        Tan "tan" Float f64::tan, ["{0}.tan()", "tan({0})", "tan({0})"];
        /// Inverse sine.
        Asin "asin" Float f64::asin, ["{0}.asin()", "asin({0})", "asin({0})"];
        /// Inverse cosine.
        Acos "acos" Float f64::acos, ["{0}.acos()", "acos({0})", "acos({0})"];
        /// Inverse tangent.
        Atan "atan" Float f64::atan, ["{0}.atan()", "atan({0})", "atan({0})"];
        /// Hyperbolic sine.
        Sinh "sinh" Float f64::sinh, ["{0}.sinh()", "sinh({0})", "sinh({0})"];
        /// Hyperbolic cosine.
        Cosh "cosh" Float f64::cosh, ["{0}.cosh()", "cosh({0})", "cosh({0})"];
        /// Hyperbolic tangent.
        Tanh "tanh" Float f64::tanh, ["{0}.tanh()", "tanh({0})", "wg_tanh({0})"];
        /// The error function.
        Erf "erf" Float libm::erf, ["{0}.erf()", "erf({0})", "wg_erf({0})"];
        /// Largest whole number not above.
        Floor "floor" Float f64::floor, ["{0}.floor()", "floor({0})", "floor({0})"];
        /// Smallest whole number not below.
        Ceil "ceil" Float f64::ceil, ["{0}.ceil()", "ceil({0})", "ceil({0})"];
        /// Nearest whole number, ties to even.
        Round "round" Float f64::round_ties_even, ["{0}.round()", "rint({0})", "round({0})"];
        /// The whole part.
        Trunc "trunc" Float f64::trunc, ["{0}.trunc()", "trunc({0})", "trunc({0})"];
        /// Not.
        Not "not" Bool |x| f64::from(x == 0.0), same("!{0}");
    }
    binary {
        /// `a + b`.
        Add "add" Number |a, b| a + b, same("{0} + {1}");
        /// `a − b`.
        Sub "sub" Number |a, b| a - b, same("{0} - {1}");
        /// `a · b`.
        Mul "mul" Number |a, b| a * b, same("{0} * {1}");
        /// `a / b`.
        Div "div" Number |a, b| a / b, ["{0}.div({1})", "wg_div({0}, {1})", "wg_div({0}, {1})"];
        /// Remainder with the sign of `b`.
        Rem "rem" Number |a, b| a - b * (a / b).floor(), ["{0}.rem({1})", "wg_rem({0}, {1})", "wg_rem({0}, {1})"];
        /// `aᵇ`.
        Pow "pow" Number f64::powf, ["{0}.pow({1})", "wg_pow({0}, {1})", "wg_pow({0}, {1})"];
        /// Angle of the point `(b, a)`.
        Atan2 "atan2" Float f64::atan2, ["{0}.atan2({1})", "atan2({0}, {1})", "atan2({0}, {1})"];
        /// The larger; NaN wins.
        Max "max" Number |a, b| if a.is_nan() || a > b { a } else { b }, ["{0}.max({1})", "wg_max({0}, {1})", "wg_max({0}, {1})"];
        /// The smaller; NaN wins.
        Min "min" Number |a, b| if a.is_nan() || a < b { a } else { b }, ["{0}.min({1})", "wg_min({0}, {1})", "wg_min({0}, {1})"];
        /// And.
        And "and" Bits |a, b| (a as i64 & b as i64) as f64, same("{0} & {1}");
        /// Or.
        Or "or" Bits |a, b| (a as i64 | b as i64) as f64, same("{0} | {1}");
        /// Exclusive or.
        Xor "xor" Bits |a, b| (a as i64 ^ b as i64) as f64, ["{0} ^ {1}", "{0} ^ {1}", "wg_xor({0}, {1})"];
        /// Bits moved up.
        Shl "shl" Int |a, b| ((a as i64) << (b as i64 & 63)) as f64, ["{0}.shl({1})", "wg_shl({0}, {1})", "wg_shl({0}, {1})"];
        /// Bits moved down.
        Shr "shr" Int |a, b| ((a as i64) >> (b as i64 & 63)) as f64, ["{0}.shr({1})", "wg_shr({0}, {1})", "wg_shr({0}, {1})"];
        /// `a == b`.
        Eq "eq" Any |a, b| f64::from(a == b), same("{0} == {1}");
        /// `a != b`.
        Ne "ne" Any |a, b| f64::from(a != b), same("{0} != {1}");
        /// `a < b`.
        Lt "lt" Number |a, b| f64::from(a < b), same("{0} < {1}");
        /// `a ≤ b`.
        Le "le" Number |a, b| f64::from(a <= b), same("{0} <= {1}");
    }
}

impl Binary {
    /// Whether its result is `bool` whatever its operands are.
    pub const fn is_comparison(self) -> bool {
        matches!(self, Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le)
    }

    /// Whether the operands can be exchanged.
    pub const fn commutes(self) -> bool {
        use Binary::*;
        matches!(self, Add | Mul | And | Or | Xor | Eq | Ne)
    }
}
