//! The elementwise vocabulary: one line per method, each a program built once.

use std::sync::LazyLock;

use smallvec::SmallVec;

use super::{
    Apply, Outs,
    pointwise::{Pointwise, cast},
};
use crate::{
    DType, Result, Scalar,
    pointwise::{Expr, Program},
};

/// The right side of a two-operand method: a value, or a number.
pub enum Rhs<'a, T> {
    /// Another value, broadcast.
    Value(&'a T),
    /// A number, taking the dtype of the left side.
    Number(f64),
}

impl<'a, T: Apply> From<&'a T> for Rhs<'a, T> {
    fn from(x: &'a T) -> Self {
        Rhs::Value(x)
    }
}

impl<T: Apply> From<f64> for Rhs<'_, T> {
    fn from(x: f64) -> Self {
        Rhs::Number(x)
    }
}

/// Programs of one op: with two inputs, and with a run-time number on the right.
struct Pair {
    value: Program,
    number: Program,
}

impl Pair {
    fn apply<T: Apply>(&self, a: &T, b: Rhs<'_, T>) -> Result<T> {
        match b {
            Rhs::Value(b) => T::apply1(Pointwise::new(&self.value, &[]), &[a, b]),
            Rhs::Number(s) => T::apply1(Pointwise::new(&self.number, &[number(s, a.spec().dtype)]), &[a]),
        }
    }
}

/// A whole number meeting integers is an integer; anything else stays real (and is refused by integer programs).
fn number(x: f64, dtype: DType) -> Scalar {
    if !dtype.is_float() && x.fract() == 0.0 { Scalar::I64(x as i64) } else { Scalar::F64(x) }
}

macro_rules! vocabulary {
    (
        unary { $($(#[$ud:meta])* $un:ident($ux:ident) = $ue:expr;)* }
        binary { $($(#[$bd:meta])* $bn:ident($ba:ident, $bb:ident) = $be:expr;)* }
        numbers { $($(#[$nd:meta])* $nn:ident($nx:ident; $($arg:ident),*) = $ne:expr;)* }
    ) => {
        /// Elementwise methods of tensors and variables. Inputs broadcast (NumPy's rule) and must have one dtype.
        pub trait PointwiseOps: Apply {
            $($(#[$ud])* fn $un(&self) -> Result<Self> {
                static P: LazyLock<Program> = LazyLock::new(|| Program::new(stringify!($un), |[$ux], []| [$ue]).lasting());
                Self::apply1(Pointwise::new(&P, &[]), &[self])
            })*
            $($(#[$bd])* fn $bn<'a>(&'a self, other: impl Into<Rhs<'a, Self>>) -> Result<Self> {
                static P: LazyLock<Pair> = LazyLock::new(|| Pair {
                    value: Program::new(stringify!($bn), |[$ba, $bb], []| [$be]).lasting(),
                    number: Program::new(stringify!($bn), |[$ba], [$bb]| [$be]).lasting(),
                });
                P.apply(self, other.into())
            })*
            $($(#[$nd])* fn $nn(&self, $($arg: f64),*) -> Result<Self> {
                static P: LazyLock<Program> = LazyLock::new(|| Program::new(stringify!($nn), |[$nx], [$($arg),*]| [$ne]).lasting());
                Self::apply1(Pointwise::new(&P, &[$($arg.into()),*]), &[self])
            })*

            /// `f(x)` for an expression of one's own, fused and differentiable. The program is built anew by each call: keep a
            /// [`Program`] and use [`apply_program`](PointwiseOps::apply_program) on a hot path.
            fn map(&self, f: impl for<'b> FnOnce(Expr<'b>) -> Expr<'b>) -> Result<Self> {
                Self::apply1(Pointwise::new(&Program::new("map", |[x], []| [f(x)]), &[]), &[self])
            }
            /// `program` with `self` as its first input and `others` as the rest; its first output.
            fn apply_program(&self, program: &Program, others: &[&Self], scalars: &[Scalar]) -> Result<Self> {
                Ok(self.apply_program_all(program, others, scalars)?.remove(0))
            }
            /// All outputs of `program`.
            fn apply_program_all(&self, program: &Program, others: &[&Self], scalars: &[Scalar]) -> Result<Outs<Self>> {
                let ins: SmallVec<[&Self; 4]> = std::iter::once(self).chain(others.iter().copied()).collect();
                super::check_inputs(program, ins.len(), scalars.len())?;
                Self::apply(Pointwise::new(program, scalars).into(), &ins)
            }
            /// The values as another element type. Half and `f32` round to nearest even; floats to integers truncate.
            fn to_dtype(&self, dtype: DType) -> Result<Self> {
                cast(self, dtype)
            }
            /// `self` where `condition` (`bool`) holds, `other` elsewhere.
            fn where_cond<'a>(&'a self, condition: &'a Self, other: impl Into<Rhs<'a, Self>>) -> Result<Self> {
                static V: LazyLock<Program> = LazyLock::new(|| Program::new("where", |[c, a, b], []| [c.select(a, b)]));
                static N: LazyLock<Program> = LazyLock::new(|| Program::new("where", |[c, a], [b]| [c.select(a, b)]));
                match other.into() {
                    Rhs::Value(b) => Self::apply1(Pointwise::new(&V, &[]), &[condition, self, b]),
                    Rhs::Number(s) => Self::apply1(Pointwise::new(&N, &[number(s, self.spec().dtype)]), &[condition, self]),
                }
            }
            /// `value` where `mask` (`bool`) holds, `self` elsewhere.
            fn masked_fill(&self, mask: &Self, value: f64) -> Result<Self> {
                static P: LazyLock<Program> = LazyLock::new(|| Program::new("masked_fill", |[x, m], [s]| [m.select(s, x)]));
                Self::apply1(Pointwise::new(&P, &[number(value, self.spec().dtype)]), &[self, mask])
            }
            /// `self + weight · (end − self)`.
            fn lerp(&self, end: &Self, weight: &Self) -> Result<Self> {
                static P: LazyLock<Program> = LazyLock::new(|| Program::new("lerp", |[a, b, w], []| [a + w * (b - a)]));
                Self::apply1(Pointwise::new(&P, &[]), &[self, end, weight])
            }
        }
        impl<T: Apply> PointwiseOps for T {}
    };
}

vocabulary! {
    unary {
        /// `−x`.
        neg(x) = -x;
        /// `|x|`; the gradient at 0 is 0.
        abs(x) = x.abs();
        /// −1, 0 or 1.
        sign(x) = x.sign();
        /// `eˣ`.
        exp(x) = x.exp();
        /// `eˣ − 1`, accurate near 0.
        expm1(x) = x.expm1();
        /// `2ˣ`.
        exp2(x) = x.exp2();
        /// Natural logarithm.
        log(x) = x.log();
        /// `ln(1 + x)`, accurate near 0.
        log1p(x) = x.log1p();
        /// Logarithm to base 2.
        log2(x) = x.log2();
        /// Square root.
        sqrt(x) = x.sqrt();
        /// `1 / √x`.
        rsqrt(x) = x.rsqrt();
        /// `1 / x`.
        recip(x) = x.recip();
        /// Sine of an angle in radians.
        sin(x) = x.sin();
        /// Cosine of an angle in radians.
        cos(x) = x.cos();
        /// Tangent of an angle in radians.
        tan(x) = x.tan();
        /// Inverse sine.
        asin(x) = x.asin();
        /// Inverse cosine.
        acos(x) = x.acos();
        /// Inverse tangent.
        atan(x) = x.atan();
        /// Hyperbolic sine.
        sinh(x) = x.sinh();
        /// Hyperbolic cosine.
        cosh(x) = x.cosh();
        /// Hyperbolic tangent.
        tanh(x) = x.tanh();
        /// The error function.
        erf(x) = x.erf();
        /// Largest whole number not above `x`.
        floor(x) = x.floor();
        /// Smallest whole number not below `x`.
        ceil(x) = x.ceil();
        /// Nearest whole number, ties to even.
        round(x) = x.round();
        /// The whole part.
        trunc(x) = x.trunc();
        /// `x²`.
        square(x) = x * x;
        /// `1 / (1 + e⁻ˣ)`.
        sigmoid(x) = x.sigmoid();
        /// `max(x, 0)`; the gradient at 0 is 0.
        relu(x) = x.relu();
        /// `x · sigmoid(x)` (Elfwing et al. 2018).
        silu(x) = x.silu();
        /// `x · Φ(x)` by the error function (Hendrycks & Gimpel 2016).
        gelu(x) = x.gelu();
        /// The tanh approximation of [`gelu`](PointwiseOps::gelu).
        gelu_tanh(x) = x.gelu_tanh();
        /// `ln(sigmoid(x))`.
        log_sigmoid(x) = x.log_sigmoid();
        /// `ln(1 + eˣ)`; the identity above 20.
        softplus(x) = x.softplus();
        /// `x / (1 + |x|)`.
        softsign(x) = x / (x.abs() + 1.0);
        /// `x · tanh(softplus(x))` (Misra 2019).
        mish(x) = x * x.softplus().tanh();
        /// `x · min(max(x + 3, 0), 6) / 6` (Howard et al. 2019); the gradient is 0 at −3 and 1 at 3, as PyTorch's.
        hardswish(x) = x.le(-3.0).select(x * 0.0, x.ge(3.0).select(x, x * (x + 3.0) / 6.0));
        /// `min(max(x + 3, 0), 6) / 6`; the gradient is 0 at −3 and 3, as PyTorch's.
        hardsigmoid(x) = x.le(-3.0).select(0.0, x.ge(3.0).select(1.0, (x + 3.0) / 6.0));
        /// Self-normalising ELU (Klambauer et al. 2017).
        selu(x) = x.gt(0.0).select(x * 1.050_700_987_355_480_5, x.expm1() * (1.050_700_987_355_480_5 * 1.673_263_242_354_377_2));
        /// Not, of `bool`.
        logical_not(x) = !x;
    }
    binary {
        /// `a + b`.
        add(a, b) = a + b;
        /// `a − b`.
        sub(a, b) = a - b;
        /// `a · b`.
        mul(a, b) = a * b;
        /// `a / b`; integers truncate, and give 0 where `b` is 0.
        div(a, b) = a / b;
        /// Remainder with the sign of `b`.
        rem(a, b) = a % b;
        /// `aᵇ`.
        pow(a, b) = a.pow(b);
        /// Angle of the point `(b, a)`.
        atan2(a, b) = a.atan2(b);
        /// The larger; NaN wins; ties share the gradient.
        maximum(a, b) = a.max(b);
        /// The smaller; NaN wins; ties share the gradient.
        minimum(a, b) = a.min(b);
        /// `a == b` as `bool`.
        eq(a, b) = a.eq(b);
        /// `a != b` as `bool`.
        ne(a, b) = a.ne(b);
        /// `a < b` as `bool`.
        lt(a, b) = a.lt(b);
        /// `a ≤ b` as `bool`.
        le(a, b) = a.le(b);
        /// `a > b` as `bool`.
        gt(a, b) = a.gt(b);
        /// `a ≥ b` as `bool`.
        ge(a, b) = a.ge(b);
        /// And, of `bool` or the bits of integers.
        logical_and(a, b) = a & b;
        /// Or, of `bool` or the bits of integers.
        logical_or(a, b) = a | b;
        /// Exclusive or, of `bool` or the bits of integers.
        logical_xor(a, b) = a ^ b;
    }
    numbers {
        /// `min(max(x, low), high)`; the gradient passes where `low ≤ x ≤ high`.
        clamp(x; low, high) = x.clamp(low, high);
        /// `x` where positive, `slope · x` elsewhere.
        leaky_relu(x; slope) = x.gt(0.0).select(x, x * slope);
        /// `x` where positive, `alpha · (eˣ − 1)` elsewhere (Clevert et al. 2016).
        elu(x; alpha) = x.gt(0.0).select(x, x.expm1() * alpha);
    }
}
