//! The elementwise vocabulary: one line per method, each a pointwise program that is built once.

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

/// The right side of a two-operand method: a value, or a host scalar.
pub enum Rhs<'a, T> {
    /// Another value, which is broadcast.
    Value(&'a T),
    /// A scalar, which takes the dtype of the left side.
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

/// Programs of one op: with two inputs, and with a run-time scalar on the right.
struct BinaryPrograms {
    value: Program,
    number: Program,
}

impl BinaryPrograms {
    #[track_caller]
    fn apply<T: Apply>(&self, a: &T, b: Rhs<'_, T>) -> Result<T> {
        match b {
            Rhs::Value(b) => T::apply1(Pointwise::new(&self.value, &[]), &[a, b]),
            Rhs::Number(s) => T::apply1(Pointwise::new(&self.number, &[number(s, a.spec().dtype)]), &[a]),
        }
    }
}

/// The scalar in an integer dtype if it is integral and the operands are integers, else real (which integer programs
/// refuse).
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
            $($(#[$ud])* #[track_caller] fn $un(&self) -> Result<Self> {
                static P: LazyLock<Program> = LazyLock::new(|| Program::new(stringify!($un), |[$ux], []| [$ue]).leak());
                Self::apply1(Pointwise::new(&P, &[]), &[self])
            })*
            $($(#[$bd])* #[track_caller] fn $bn<'a>(&'a self, other: impl Into<Rhs<'a, Self>>) -> Result<Self> {
                static P: LazyLock<BinaryPrograms> = LazyLock::new(|| BinaryPrograms {
                    value: Program::new(stringify!($bn), |[$ba, $bb], []| [$be]).leak(),
                    number: Program::new(stringify!($bn), |[$ba], [$bb]| [$be]).leak(),
                });
                P.apply(self, other.into())
            })*
            $($(#[$nd])* #[track_caller] fn $nn(&self, $($arg: f64),*) -> Result<Self> {
                static P: LazyLock<Program> = LazyLock::new(|| Program::new(stringify!($nn), |[$nx], [$($arg),*]| [$ne]).leak());
                Self::apply1(Pointwise::new(&P, &[$($arg.into()),*]), &[self])
            })*

            /// Applies `f` elementwise as a custom expression, fused and differentiable. Every call builds the program
            /// again: on a hot path, keep a [`Program`] and use [`apply_program`](PointwiseOps::apply_program) instead.
            #[track_caller]
            fn map(&self, f: impl for<'b> FnOnce(Expr<'b>) -> Expr<'b>) -> Result<Self> {
                Self::apply1(Pointwise::new(&Program::new("map", |[x], []| [f(x)]), &[]), &[self])
            }
            /// Applies `program` to `self` as its first input and `others` as the rest; returns its first output.
            #[track_caller]
            fn apply_program(&self, program: &Program, others: &[&Self], scalars: &[Scalar]) -> Result<Self> {
                Ok(self.apply_program_all(program, others, scalars)?.remove(0))
            }
            /// Applies `program` and returns all of its outputs.
            #[track_caller]
            fn apply_program_all(&self, program: &Program, others: &[&Self], scalars: &[Scalar]) -> Result<Outs<Self>> {
                let ins: SmallVec<[&Self; 4]> = std::iter::once(self).chain(others.iter().copied()).collect();
                super::check_inputs(program, ins.len(), scalars.len())?;
                Self::apply(Pointwise::new(program, scalars).into(), &ins)
            }
            /// The values converted to another dtype; PyTorch's `to`. Casts to f16, bf16 and `f32` round to nearest
            /// even; floats to integers truncate.
            #[track_caller]
            fn to_dtype(&self, dtype: DType) -> Result<Self> {
                cast(self, dtype)
            }
            /// The elements of `self` where `condition` (`bool`) holds, and of `other` elsewhere.
            #[doc(alias = "where")]
            #[track_caller]
            fn where_cond<'a>(&'a self, condition: &'a Self, other: impl Into<Rhs<'a, Self>>) -> Result<Self> {
                static V: LazyLock<Program> = LazyLock::new(|| Program::new("where", |[c, a, b], []| [c.select(a, b)]));
                static N: LazyLock<Program> = LazyLock::new(|| Program::new("where", |[c, a], [b]| [c.select(a, b)]));
                match other.into() {
                    Rhs::Value(b) => Self::apply1(Pointwise::new(&V, &[]), &[condition, self, b]),
                    Rhs::Number(s) => Self::apply1(Pointwise::new(&N, &[number(s, self.spec().dtype)]), &[condition, self]),
                }
            }
            /// Replaces elements by `value` where `mask` (`bool`) holds.
            #[track_caller]
            fn masked_fill(&self, mask: &Self, value: f64) -> Result<Self> {
                static P: LazyLock<Program> = LazyLock::new(|| Program::new("masked_fill", |[x, m], [s]| [m.select(s, x)]));
                Self::apply1(Pointwise::new(&P, &[number(value, self.spec().dtype)]), &[self, mask])
            }
            /// Linear interpolation, `self + weight · (end − self)`.
            #[track_caller]
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
        /// The negation `−x`, elementwise.
        neg(x) = -x;
        /// The absolute value `|x|`; the gradient at 0 is 0.
        abs(x) = x.abs();
        /// The sign of `x`: −1, 0 or 1.
        sign(x) = x.sign();
        /// The exponential `eˣ`, elementwise.
        exp(x) = x.exp();
        /// The exponential minus one, `eˣ − 1`, accurate near 0.
        expm1(x) = x.expm1();
        /// The power of two `2ˣ`, elementwise.
        exp2(x) = x.exp2();
        /// The natural logarithm `ln x`, elementwise.
        log(x) = x.log();
        /// The logarithm `ln(1 + x)`, accurate near 0.
        log1p(x) = x.log1p();
        /// The logarithm to base 2.
        log2(x) = x.log2();
        /// The square root `√x`, elementwise.
        sqrt(x) = x.sqrt();
        /// The reciprocal square root `1/√x`, elementwise.
        rsqrt(x) = x.rsqrt();
        /// The reciprocal `1/x`, elementwise.
        #[doc(alias = "reciprocal")]
        recip(x) = x.recip();
        /// Sine of an angle in radians, at any magnitude: an `f64` is reduced exactly on the CPU.
        sin(x) = x.sin();
        /// Cosine of an angle in radians.
        cos(x) = x.cos();
        /// Tangent of an angle in radians.
        tan(x) = x.tan();
        /// The inverse sine, in radians.
        asin(x) = x.asin();
        /// The inverse cosine, in radians.
        acos(x) = x.acos();
        /// The inverse tangent, in radians.
        atan(x) = x.atan();
        /// The hyperbolic sine, elementwise.
        sinh(x) = x.sinh();
        /// The hyperbolic cosine, elementwise.
        cosh(x) = x.cosh();
        /// The hyperbolic tangent, elementwise.
        tanh(x) = x.tanh();
        /// The inverse hyperbolic sine, elementwise.
        #[doc(alias = "arcsinh")]
        asinh(x) = x.asinh();
        /// Inverse hyperbolic cosine; NaN below 1.
        #[doc(alias = "arccosh")]
        acosh(x) = x.acosh();
        /// Inverse hyperbolic tangent; NaN outside `[−1, 1]`.
        #[doc(alias = "arctanh")]
        atanh(x) = x.atanh();
        /// The Gauss error function `erf(x)`, elementwise.
        erf(x) = x.erf();
        /// The complementary error function `1 − erf(x)`, accurate where it is small.
        erfc(x) = x.erfc();
        /// The floor of `x`: the largest integer not above it.
        floor(x) = x.floor();
        /// The ceiling of `x`: the smallest integer not below it.
        ceil(x) = x.ceil();
        /// The nearest integer, ties to even.
        round(x) = x.round();
        /// The integer part of `x`: rounding towards zero.
        trunc(x) = x.trunc();
        /// The square `x²`, elementwise.
        square(x) = x * x;
        /// The logistic function `1 / (1 + e⁻ˣ)`.
        sigmoid(x) = x.sigmoid();
        /// The ReLU activation `max(x, 0)`; the gradient at 0 is 0.
        relu(x) = x.relu();
        /// The SiLU activation `x · sigmoid(x)` (Elfwing et al. 2018).
        #[doc(alias = "swish")]
        silu(x) = x.silu();
        /// The GELU activation `x · Φ(x)`, by the error function (Hendrycks & Gimpel 2016).
        gelu(x) = x.gelu();
        /// The tanh approximation of [`gelu`](PointwiseOps::gelu).
        gelu_tanh(x) = x.gelu_tanh();
        /// The logarithm of the sigmoid, `ln(sigmoid(x))`, computed stably.
        #[doc(alias = "logsigmoid")]
        log_sigmoid(x) = x.log_sigmoid();
        /// The softplus activation `ln(1 + eˣ)`; the identity above 20. See
        /// [`softplus_with`](PointwiseOps::softplus_with).
        softplus(x) = x.softplus();
        /// The softsign activation `x / (1 + |x|)`.
        softsign(x) = x.softsign();
        /// The Mish activation `x · tanh(softplus(x))` (Misra 2019).
        mish(x) = x.mish();
        /// The hard-swish activation `x · min(max(x + 3, 0), 6) / 6` (Howard et al. 2019); the gradient is 0 at −3 and
        /// 1 at 3, as in PyTorch.
        hardswish(x) = x * x.le(-3.0).select(0.0, x.ge(3.0).select(1.0, (x + 3.0) / 6.0));
        /// The hard-sigmoid activation `min(max(x + 3, 0), 6) / 6`; the gradient is 0 at −3 and 3, as in PyTorch.
        hardsigmoid(x) = x.le(-3.0).select(0.0, x.ge(3.0).select(1.0, (x + 3.0) / 6.0));
        /// The self-normalizing ELU activation (Klambauer et al. 2017).
        selu(x) = x.gt(0.0).select(x * 1.050_700_987_355_480_5, x.expm1() * (1.050_700_987_355_480_5 * 1.673_263_242_354_377_2));
        /// The clipped ReLU `min(max(x, 0), 6)`; the gradient is 0 at 0 and 6, as in PyTorch.
        relu6(x) = x.le(0.0).select(0.0, x.ge(6.0).select(6.0, x));
        /// The tanh-shrink activation, `x − tanh(x)`.
        tanhshrink(x) = x - x.tanh();
        /// Tests whether `x` (of a floating dtype) is NaN, as `bool`.
        isnan(x) = x.abs().ne(x.abs());
        /// Tests whether `x` (of a floating dtype) is an infinity, as `bool`.
        isinf(x) = x.abs().eq(f64::INFINITY);
        /// Tests whether `x` (of a floating dtype) is neither NaN nor an infinity, as `bool`.
        isfinite(x) = x.abs().lt(f64::INFINITY);
        /// Logical negation of `bool` elements.
        logical_not(x) = !x;
    }
    binary {
        /// The sum `a + b`, elementwise.
        add(a, b) = a + b;
        /// The difference `a − b`, elementwise.
        sub(a, b) = a - b;
        /// The elementwise product `a · b`.
        mul(a, b) = a * b;
        /// The quotient `a / b`; integers truncate, and give 0 where `b` is 0.
        div(a, b) = a / b;
        /// The remainder of `a / b`, with the sign of `b`.
        #[doc(alias = "remainder")]
        rem(a, b) = a % b;
        /// The power `aᵇ`, elementwise.
        pow(a, b) = a.pow(b);
        /// The angle of the point `(b, a)`, in radians.
        atan2(a, b) = a.atan2(b);
        /// The larger of two elements; NaN wins, and ties share the gradient.
        maximum(a, b) = a.max(b);
        /// The smaller of two elements; NaN wins, and ties share the gradient.
        minimum(a, b) = a.min(b);
        /// Elementwise equality `a == b`, a `bool`.
        eq(a, b) = a.eq(b);
        /// Elementwise inequality `a != b`, a `bool`.
        ne(a, b) = a.ne(b);
        /// The comparison `a < b`, a `bool`.
        lt(a, b) = a.lt(b);
        /// The comparison `a ≤ b`, a `bool`.
        le(a, b) = a.le(b);
        /// The comparison `a > b`, a `bool`.
        gt(a, b) = a.gt(b);
        /// The comparison `a ≥ b`, a `bool`.
        ge(a, b) = a.ge(b);
        /// Logical and of `bool`, bitwise and of integers.
        #[doc(alias = "bitwise_and")]
        logical_and(a, b) = a & b;
        /// Logical or of `bool`, bitwise or of integers.
        #[doc(alias = "bitwise_or")]
        logical_or(a, b) = a | b;
        /// Logical exclusive or of `bool`, bitwise exclusive or of integers.
        #[doc(alias = "bitwise_xor")]
        logical_xor(a, b) = a ^ b;
        /// Left shift of integers by `b` modulo the width.
        #[doc(alias = "bitwise_left_shift")]
        shl(a, b) = a << b;
        /// Right shift of integers by `b` modulo the width; the shift of a signed integer is arithmetic.
        #[doc(alias = "bitwise_right_shift")]
        shr(a, b) = a >> b;
    }
    numbers {
        /// The difference `value − x`, for `value - &x`.
        rsub(x; value) = value - x;
        /// The quotient `value / x`, for `value / &x`.
        rdiv(x; value) = value / x;
        /// Clamps to `[low, high]`; the gradient passes where `low < x < high`, and at NaN.
        clamp(x; low, high) = x.clamp(low, high);
        /// The leaky ReLU activation: `x` where positive, `slope · x` elsewhere.
        leaky_relu(x; slope) = x.gt(0.0).select(x, x * slope);
        /// The ELU activation: `x` where positive, `alpha · (eˣ − 1)` elsewhere (Clevert et al. 2016).
        elu(x; alpha) = x.gt(0.0).select(x, x.expm1() * alpha);
        /// The CELU activation: `x` where positive, `alpha · (e^(x/alpha) − 1)` elsewhere (Barron 2017):
        /// [`elu`](PointwiseOps::elu) with a continuous slope.
        celu(x; alpha) = x.gt(0.0).select(x, (x / alpha).expm1() * alpha);
        /// The SELU activation with explicit parameters: `scale · x` where positive, `scale · alpha · (eˣ − 1)`
        /// elsewhere.
        selu_with(x; alpha, scale) = x.gt(0.0).select(x, x.expm1() * alpha) * scale;
        /// ONNX's hard sigmoid, `min(max(slope · x + offset, 0), 1)`; the gradient is 0 at both ends. PyTorch's,
        /// [`hardsigmoid`](PointwiseOps::hardsigmoid), has a slope of 1/6 and an offset of 1/2.
        hardsigmoid_with(x; slope, offset) = {
            let y = x * slope + offset;
            y.le(0.0).select(0.0, y.ge(1.0).select(1.0, y))
        };
        /// The hard-tanh activation `min(max(x, low), high)`; the gradient is 0 at both ends, as in PyTorch.
        hardtanh(x; low, high) = x.le(low).select(low, x.ge(high).select(high, x));
        /// The softplus activation `ln(1 + e^(beta · x)) / beta`; the identity where `beta · x` is above `threshold`.
        softplus_with(x; beta, threshold) = {
            let scaled = x * beta;
            scaled.gt(threshold).select(x, scaled.log1p_exp() / beta)
        };
        /// The soft-shrink activation: `x` moved towards 0 by `lambda`, 0 in between.
        softshrink(x; lambda) = x.gt(lambda).select(x - lambda, x.lt(-lambda).select(x + lambda, x * 0.0));
        /// The hard-shrink activation: `x` where its magnitude is above `lambda`, 0 elsewhere.
        hardshrink(x; lambda) = x.abs().le(lambda).select(0.0, x);
        /// The threshold activation: `x` where above `limit`, `value` elsewhere.
        threshold(x; limit, value) = x.le(limit).select(value, x);
    }
}
