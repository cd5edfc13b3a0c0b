//! Expressions: the values that programs are written with.

use std::{
    cell::Cell,
    f64::consts::{FRAC_1_SQRT_2, LN_2, PI},
    marker::PhantomData,
    ops,
};

use super::{Binary, Id, Inst, ProgramBuilder, Unary};
use crate::DType;

/// The bound above which `√(x² ± 1)` equals `x` in every dtype.
const FAR: f64 = 268_435_456.0;

/// A symbolic value of a pointwise program that is being built, like a node of a traced graph: one number per element.
/// It is free to copy; operators and methods append to the program.
///
/// Operands must have one dtype. Constants, run-time scalars and element positions take the dtype of the operands they
/// are combined with.
#[derive(Clone, Copy)]
pub struct Expr<'b> {
    builder: &'b ProgramBuilder,
    id: Id,
    /// A marker that keeps the lifetime invariant, so that expressions of two programs cannot be combined.
    brand: PhantomData<Cell<&'b ()>>,
}

/// Types that convert to an expression: an expression itself, or a constant.
pub trait IntoExpr<'b> {
    /// Converts this value to an expression of `builder`'s program.
    fn into_expr(self, builder: &'b ProgramBuilder) -> Expr<'b>;
}

impl<'b> IntoExpr<'b> for Expr<'b> {
    fn into_expr(self, _: &'b ProgramBuilder) -> Expr<'b> {
        self
    }
}

/// A real constant, which combines with floats only.
impl<'b> IntoExpr<'b> for f64 {
    fn into_expr(self, builder: &'b ProgramBuilder) -> Expr<'b> {
        builder.c(self)
    }
}

/// An integer constant, which combines with floats and integers.
impl<'b> IntoExpr<'b> for i64 {
    fn into_expr(self, builder: &'b ProgramBuilder) -> Expr<'b> {
        builder.int(self)
    }
}

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {
        impl<'b> Expr<'b> { $($(#[$doc])* pub fn $name(self) -> Self { self.unary(Unary::$op) })* }
    };
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {
        impl<'b> Expr<'b> {
            $($(#[$doc])* pub fn $name(self, other: impl IntoExpr<'b>) -> Self { self.binary(Binary::$op, other) })*
        }
    };
}

unary! {
    /// The absolute value `|x|`, elementwise.
    abs Abs;
    /// The sign of the operand: −1, 0 or 1.
    sign Sign;
    /// The exponential `eˣ`, elementwise.
    exp Exp;
    /// The exponential minus one, `eˣ − 1`, accurate near 0.
    expm1 Expm1;
    /// The power of two `2ˣ`, elementwise.
    exp2 Exp2;
    /// The natural logarithm `ln x`, elementwise.
    log Log;
    /// The logarithm `ln(1 + x)`, accurate near 0.
    log1p Log1p;
    /// The logarithm to base 2.
    log2 Log2;
    /// The square root `√x`, elementwise.
    sqrt Sqrt;
    /// The reciprocal square root `1/√x`, elementwise.
    rsqrt Rsqrt;
    /// The reciprocal `1/x`, elementwise.
    recip Recip;
    /// The sine of an angle in radians.
    sin Sin;
    /// The cosine of an angle in radians.
    cos Cos;
    /// The tangent of an angle in radians.
    tan Tan;
    /// The inverse sine, in radians.
    asin Asin;
    /// The inverse cosine, in radians.
    acos Acos;
    /// The inverse tangent, in radians.
    atan Atan;
    /// The hyperbolic sine, elementwise.
    sinh Sinh;
    /// The hyperbolic cosine, elementwise.
    cosh Cosh;
    /// The hyperbolic tangent, elementwise.
    tanh Tanh;
    /// The Gauss error function `erf(x)`, elementwise.
    erf Erf;
    /// The complementary error function `1 − erf(x)`, accurate where it is small.
    erfc Erfc;
    /// The floor: the largest integer not above the operand.
    floor Floor;
    /// The ceiling: the smallest integer not below the operand.
    ceil Ceil;
    /// The nearest integer, ties to even.
    round Round;
    /// The integer part of `x`: rounding towards zero.
    trunc Trunc;
}

binary! {
    /// The power `selfᵒᵗʰᵉʳ`, elementwise.
    pow Pow;
    /// The angle of the point `(other, self)`, in radians.
    atan2 Atan2;
    /// The larger of two elements; NaN wins, and ties share the gradient.
    max Max;
    /// The smaller of two elements; NaN wins, and ties share the gradient.
    min Min;
    /// Elementwise equality `self == other`, a `bool`.
    eq Eq;
    /// Elementwise inequality `self != other`, a `bool`.
    ne Ne;
    /// The comparison `self < other`, a `bool`.
    lt Lt;
    /// The comparison `self ≤ other`, a `bool`.
    le Le;
}

impl<'b> Expr<'b> {
    pub(super) fn new(builder: &'b ProgramBuilder, id: Id) -> Self {
        Expr { builder, id, brand: PhantomData }
    }

    /// The builder of the program that the expression is of.
    pub(crate) fn builder(self) -> &'b ProgramBuilder {
        self.builder
    }

    pub(super) fn id(self) -> Id {
        self.id
    }

    fn push(self, inst: Inst) -> Self {
        Expr::new(self.builder, self.builder.push(inst))
    }

    /// Applies a unary op by its row in the op table, for code that iterates over all ops.
    pub fn unary(self, op: Unary) -> Self {
        self.push(Inst::Unary(op, self.id))
    }

    /// Applies a binary op by its row in the op table.
    pub fn binary(self, op: Binary, other: impl IntoExpr<'b>) -> Self {
        self.push(Inst::Binary(op, self.id, other.into_expr(self.builder).id))
    }

    /// The comparison `self > other`, a `bool`.
    pub fn gt(self, other: impl IntoExpr<'b>) -> Self {
        other.into_expr(self.builder).lt(self)
    }

    /// The comparison `self ≥ other`, a `bool`.
    pub fn ge(self, other: impl IntoExpr<'b>) -> Self {
        other.into_expr(self.builder).le(self)
    }

    /// Selects `a` where this `bool` holds, and `b` elsewhere.
    pub fn select(self, a: impl IntoExpr<'b>, b: impl IntoExpr<'b>) -> Self {
        let (a, b) = (a.into_expr(self.builder), b.into_expr(self.builder));
        self.push(Inst::Select(self.id, a.id, b.id))
    }

    /// A cast to another dtype. Floats to integers truncate and saturate, integers wrap, and `bool` is true unless the
    /// value is 0.
    pub fn cast(self, to: DType) -> Self {
        self.push(Inst::Cast(to, self.id))
    }

    /// A cast to the dtype of `like`.
    pub fn cast_like(self, like: Expr<'b>) -> Self {
        self.push(Inst::CastLike(self.id, like.id))
    }

    /// Clamps to `[low, high]`; the gradient passes where `low < x < high`, and at NaN.
    pub fn clamp(self, low: impl IntoExpr<'b>, high: impl IntoExpr<'b>) -> Self {
        let (low, high) = (low.into_expr(self.builder), high.into_expr(self.builder));
        let above = self.le(low).select(low, self);
        high.le(above).select(high, above)
    }

    /// The power `selfᵉ` for a constant exponent: small integer and half-integer exponents avoid `pow`, as in PyTorch.
    pub fn pow_f(self, exponent: f64) -> Self {
        match exponent {
            1.0 => self,
            2.0 => self.square(),
            3.0 => self.square() * self,
            -1.0 => self.recip(),
            -2.0 => self.square().recip(),
            0.5 => self.sqrt(),
            -0.5 => self.rsqrt(),
            e => self.pow(e),
        }
    }

    /// The square `x²`, elementwise.
    pub fn square(self) -> Self {
        self * self
    }

    /// The logistic function `1 / (1 + e⁻ˣ)`.
    ///
    /// It is computed from `z = e^−|x|`, which cannot overflow. Small results keep their digits, and so does the
    /// derivative, which contains no `0·∞`.
    pub fn sigmoid(self) -> Self {
        let (negative, z) = self.falling();
        negative.select(z, 1.0) / (z + 1.0)
    }

    /// The condition `x < 0`, and `e^−|x|`. The latter uses `select`, since the gradient of `|x|` at 0 would be 0.
    fn falling(self) -> (Self, Self) {
        let negative = self.lt(0.0);
        (negative, negative.select(self, -self).exp())
    }

    /// The ReLU activation `max(x, 0)`; the gradient at 0 is 0, and NaN is kept.
    pub fn relu(self) -> Self {
        self.le(0.0).select(0.0, self)
    }

    /// The SiLU activation `x · sigmoid(x)` (Elfwing et al. 2018).
    pub fn silu(self) -> Self {
        self * self.gating().sigmoid()
    }

    /// `x` clamped to ±1000, beyond which every gate of `x` is 0 or 1 in all dtypes. A gate of it has derivative 0
    /// there, where the gradient times a large `x` could be infinite.
    fn gating(self) -> Self {
        self.clamp(-1000.0, 1000.0)
    }

    /// The Mish activation `x · tanh(softplus(x))` (Misra 2019).
    pub fn mish(self) -> Self {
        self * self.gating().softplus().tanh()
    }

    /// The GELU activation `x · Φ(x)` by the error function (Hendrycks & Gimpel 2016). `Φ(x)` is computed as
    /// `erfc(−x/√2) / 2`, which keeps its digits where it is small.
    pub fn gelu(self) -> Self {
        self * 0.5 * (self.gating() * -FRAC_1_SQRT_2).erfc()
    }

    /// The tanh approximation of GELU, `x · Φ(x)`. `(1 + tanh u) / 2` is computed as `sigmoid(2u)`, which keeps its
    /// digits where it is small.
    pub fn gelu_tanh(self) -> Self {
        let x = self.gating();
        let twice = (x + x * x * x * 0.044_715) * (2.0 * (2.0 / PI).sqrt());
        self * twice.sigmoid()
    }

    /// The inverse hyperbolic sine: [`atanh`](Expr::atanh) of `x/√(1 + x²)` near 0, the logarithm beyond, and no
    /// squares for large `|x|`.
    pub fn asinh(self) -> Self {
        let a = self.abs();
        let ratio = self * (self * self + 1.0).rsqrt();
        let far = a.gt(FAR).select(a.log() + LN_2, (a + (a * a + 1.0).sqrt()).log());
        a.lt(0.5).select(ratio.atanh(), self.sign() * far)
    }

    /// Inverse hyperbolic cosine; NaN below 1.
    pub fn acosh(self) -> Self {
        let t = self - 1.0;
        // The product of two roots: under one root, the product would be positive again below −1.
        self.gt(FAR).select(self.log() + LN_2, (t + t.sqrt() * (self + 1.0).sqrt()).log1p())
    }

    /// The softsign activation `x / (1 + |x|)`, computed so that the difference from ±1 keeps its digits.
    pub fn softsign(self) -> Self {
        let a = self.abs();
        let rest = (a + 1.0).recip();
        a.gt(1.0).select(self.sign() * (1.0 - rest), self * rest)
    }

    /// Inverse hyperbolic tangent; NaN outside `[−1, 1]`. Both logarithms have its sign.
    pub fn atanh(self) -> Self {
        (self.log1p() - (-self).log1p()) * 0.5
    }

    /// The softplus activation `ln(1 + eˣ)`; the identity above 20.
    pub fn softplus(self) -> Self {
        self.softplus_with(1.0, 20.0)
    }

    /// The softplus activation `ln(1 + e^(βx)) / β`; the identity where `βx` is above `threshold`.
    pub fn softplus_with(self, beta: f64, threshold: f64) -> Self {
        let scaled = self * beta;
        scaled.gt(threshold).select(self, scaled.log1p_exp() / beta)
    }

    /// The function `ln(1 + eˣ)` without overflow, whose second derivative keeps its digits for large `|x|`.
    pub(crate) fn log1p_exp(self) -> Self {
        let (negative, z) = self.falling();
        negative.select(0.0, self) + z.log1p()
    }

    /// The logarithm of the sigmoid, `ln(sigmoid(x))`, computed stably.
    pub fn log_sigmoid(self) -> Self {
        let (negative, z) = self.falling();
        negative.select(self, 0.0) - z.log1p()
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident;)*) => {$(
        impl<'b, T: IntoExpr<'b>> ops::$trait<T> for Expr<'b> {
            type Output = Expr<'b>;
            fn $method(self, other: T) -> Self { self.binary(Binary::$op, other) }
        }
        impl<'b> ops::$trait<Expr<'b>> for f64 {
            type Output = Expr<'b>;
            fn $method(self, other: Expr<'b>) -> Expr<'b> { other.builder.c(self).binary(Binary::$op, other) }
        }
    )*};
}

operators! {
    Add add Add;
    Sub sub Sub;
    Mul mul Mul;
    Div div Div;
    Rem rem Rem;
    BitAnd bitand And;
    BitOr bitor Or;
    BitXor bitxor Xor;
    Shl shl Shl;
    Shr shr Shr;
}

impl<'b> ops::Neg for Expr<'b> {
    type Output = Expr<'b>;
    fn neg(self) -> Self {
        self.unary(Unary::Neg)
    }
}

impl<'b> ops::Not for Expr<'b> {
    type Output = Expr<'b>;
    fn not(self) -> Self {
        self.unary(Unary::Not)
    }
}
