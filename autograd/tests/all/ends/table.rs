//! Functions with closed forms of their values, slopes and curvatures.

use std::f64::consts::{FRAC_1_SQRT_2, LN_2, PI};

use autograd::Var;
use numcore::{
    Result,
    ops::{Apply, PointwiseOps},
    pointwise::{Number, Unary},
};
use runtime_cpu::Cpu;

type V = Var<Cpu>;
pub type Closed = fn(f64) -> f64;

/// A function, and its value, slope and curvature.
pub type Row = (&'static str, fn(&V) -> Result<V>, [Closed; 3]);

/// A place where a convention stands in for the limit: function, point, order of the derivative.
pub const CONVENTIONS: &[(&str, f64, usize)] = &[
    ("silu", f64::NEG_INFINITY, 0),
    ("gelu", f64::NEG_INFINITY, 0),
    ("gelu_tanh", f64::NEG_INFINITY, 0),
    ("mish", f64::NEG_INFINITY, 0),
    ("hardswish", f64::NEG_INFINITY, 0),
    ("atan", f64::INFINITY, 2),
    ("atan", f64::NEG_INFINITY, 2),
    ("erf", f64::INFINITY, 2),
    ("erf", f64::NEG_INFINITY, 2),
    ("erfc", f64::INFINITY, 2),
    ("erfc", f64::NEG_INFINITY, 2),
    // An infinite curvature is NaN there.
    ("asin", 1.0, 2),
    ("asin", -1.0, 2),
    ("acos", 1.0, 2),
    ("acos", -1.0, 2),
    ("acosh", 1.0, 2),
    ("atanh", f64::INFINITY, 2),
    ("atanh", f64::NEG_INFINITY, 2),
    // It jumps from 2 to −2.
    ("softsign", 0.0, 2),
];

fn eval(op: Unary, x: f64) -> f64 {
    op.eval(Number::Float(x)).to_f64()
}

fn times(a: f64, b: f64) -> f64 {
    if a == 0.0 || b == 0.0 { 0.0 } else { a * b }
}

fn sech2(x: f64) -> f64 {
    x.cosh().powi(-2)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The slope and the curvature of `sigmoid`.
fn slope(x: f64) -> f64 {
    sigmoid(x) * sigmoid(-x)
}

fn curvature(x: f64) -> f64 {
    -slope(x) * (0.5 * x).tanh()
}

/// Computes `(1 − x)(1 + x)`.
fn between(x: f64) -> f64 {
    (1.0 - x) * (1.0 + x)
}

fn asinh(x: f64) -> f64 {
    if x.abs() > 1e100 { x.signum() * (x.abs().ln() + LN_2) } else { x.asinh() }
}

fn acosh(x: f64) -> f64 {
    let t = x - 1.0;
    if x > 1e100 { x.ln() + LN_2 } else { (t + t.sqrt() * (x + 1.0).sqrt()).ln_1p() }
}

fn atanh(x: f64) -> f64 {
    0.5 * x.signum() * (2.0 * x.abs() / (1.0 - x.abs())).ln_1p()
}

/// A constant beside each element.
fn constant_like(x: &V, value: f64) -> Result<V> {
    x.detach().masked_fill(&x.detach().eq(x)?, value)
}

fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

fn normal(x: f64) -> f64 {
    0.5 * eval(Unary::Erfc, -x * FRAC_1_SQRT_2)
}

/// The argument of the sigmoid in `gelu_tanh`, its slope and its curvature.
fn inner(x: f64) -> [f64; 3] {
    let c = 2.0 * (2.0 / PI).sqrt();
    [c * (x + 0.044_715 * x * x * x), c * (1.0 + 3.0 * 0.044_715 * x * x), c * 6.0 * 0.044_715 * x]
}

/// Computes `sech²(softplus) · sigmoid`, and its slope.
fn gate(x: f64) -> [f64; 2] {
    let (s, sp) = (sigmoid(x), softplus(x));
    [sech2(sp) * s, sech2(sp) * (slope(x) - 2.0 * sp.tanh() * s * s)]
}

fn within(x: f64, low: f64, high: f64, inside: f64, outside: f64) -> f64 {
    if low < x && x < high { inside } else { outside }
}

fn above(x: f64, limit: f64, yes: f64, no: f64) -> f64 {
    if x > limit { yes } else { no }
}

pub fn table() -> Vec<Row> {
    const A: f64 = 1.673_263_242_354_377_2;
    const S: f64 = 1.050_700_987_355_480_5;
    vec![
        ("exp", |x| x.exp(), [f64::exp; 3]),
        ("expm1", |x| x.expm1(), [f64::exp_m1, f64::exp, f64::exp]),
        ("exp2", |x| x.exp2(), [f64::exp2, |x| x.exp2() * LN_2, |x| x.exp2() * LN_2 * LN_2]),
        ("log", |x| x.log(), [f64::ln, |x| 1.0 / x, |x| -1.0 / (x * x)]),
        ("log2", |x| x.log2(), [f64::log2, |x| 1.0 / x / LN_2, |x| -1.0 / (x * x) / LN_2]),
        ("log1p", |x| x.log1p(), [f64::ln_1p, |x| 1.0 / (1.0 + x), |x| -((1.0 + x).powi(-2))]),
        ("square", |x| x.square(), [|x| x * x, |x| 2.0 * x, |_| 2.0]),
        ("sinh", |x| x.sinh(), [f64::sinh, f64::cosh, f64::sinh]),
        ("cosh", |x| x.cosh(), [f64::cosh, f64::sinh, f64::cosh]),
        ("tanh", |x| x.tanh(), [f64::tanh, sech2, |x| -2.0 * x.tanh() * sech2(x)]),
        ("tanhshrink", |x| x.tanhshrink(), [|x| x - x.tanh(), |x| x.tanh().powi(2), |x| 2.0 * x.tanh() * sech2(x)]),
        ("atan", |x| x.atan(), [f64::atan, |x| 1.0 / (1.0 + x * x), |x| times(-2.0 * x, (1.0 + x * x).powi(-2))]),
        (
            "erf",
            |x| x.erf(),
            [
                |x| eval(Unary::Erf, x),
                |x| 2.0 / PI.sqrt() * (-x * x).exp(),
                |x| times(-4.0 / PI.sqrt() * x, (-x * x).exp()),
            ],
        ),
        ("sigmoid", |x| x.sigmoid(), [sigmoid, slope, curvature]),
        (
            "log_sigmoid",
            |x| x.log_sigmoid(),
            [|x| x.min(0.0) - (-x.abs()).exp().ln_1p(), |x| sigmoid(-x), |x| -slope(x)],
        ),
        (
            "softplus",
            |x| x.softplus(),
            [softplus, |x| above(x, 20.0, 1.0, sigmoid(x)), |x| above(x, 20.0, 0.0, slope(x))],
        ),
        (
            "silu",
            |x| x.silu(),
            [
                |x| times(x, sigmoid(x)),
                |x| sigmoid(x) + times(x, slope(x)),
                |x| 2.0 * slope(x) + times(x, curvature(x)),
            ],
        ),
        (
            "gelu",
            |x| x.gelu(),
            [|x| times(x, normal(x)), |x| normal(x) + times(x, density(x)), |x| times(2.0 - x * x, density(x))],
        ),
        (
            "gelu_tanh",
            |x| x.gelu_tanh(),
            [
                |x| times(x, sigmoid(inner(x)[0])),
                |x| sigmoid(inner(x)[0]) + times(x * inner(x)[1], slope(inner(x)[0])),
                |x| {
                    let [w, dw, ddw] = inner(x);
                    times(2.0 * dw + x * ddw, slope(w)) + times(x * dw * dw, curvature(w))
                },
            ],
        ),
        (
            "mish",
            |x| x.mish(),
            [
                |x| times(x, softplus(x).tanh()),
                |x| softplus(x).tanh() + times(x, gate(x)[0]),
                |x| 2.0 * gate(x)[0] + times(x, gate(x)[1]),
            ],
        ),
        (
            "elu",
            |x| x.elu(1.5),
            [
                |x| above(x, 0.0, x, 1.5 * x.exp_m1()),
                |x| above(x, 0.0, 1.0, 1.5 * x.exp()),
                |x| above(x, 0.0, 0.0, 1.5 * x.exp()),
            ],
        ),
        (
            "celu",
            |x| x.celu(2.0),
            [
                |x| above(x, 0.0, x, 2.0 * (x / 2.0).exp_m1()),
                |x| above(x, 0.0, 1.0, (x / 2.0).exp()),
                |x| above(x, 0.0, 0.0, 0.5 * (x / 2.0).exp()),
            ],
        ),
        (
            "selu",
            |x| x.selu(),
            [
                |x| above(x, 0.0, S * x, S * A * x.exp_m1()),
                |x| above(x, 0.0, S, S * A * x.exp()),
                |x| above(x, 0.0, 0.0, S * A * x.exp()),
            ],
        ),
        ("relu", |x| x.relu(), [|x| x.max(0.0), |x| above(x, 0.0, 1.0, 0.0), |_| 0.0]),
        ("leaky_relu", |x| x.leaky_relu(0.1), [|x| above(x, 0.0, x, 0.1 * x), |x| above(x, 0.0, 1.0, 0.1), |_| 0.0]),
        ("threshold", |x| x.threshold(0.5, 9.0), [|x| above(x, 0.5, x, 9.0), |x| above(x, 0.5, 1.0, 0.0), |_| 0.0]),
        ("relu6", |x| x.relu6(), [|x| x.clamp(0.0, 6.0), |x| within(x, 0.0, 6.0, 1.0, 0.0), |_| 0.0]),
        ("clamp", |x| x.clamp(-1.0, 0.5), [|x| x.clamp(-1.0, 0.5), |x| within(x, -1.0, 0.5, 1.0, 0.0), |_| 0.0]),
        ("hardtanh", |x| x.hardtanh(-1.0, 1.0), [|x| x.clamp(-1.0, 1.0), |x| within(x, -1.0, 1.0, 1.0, 0.0), |_| 0.0]),
        (
            "hardsigmoid",
            |x| x.hardsigmoid(),
            [|x| (x + 3.0).clamp(0.0, 6.0) / 6.0, |x| within(x, -3.0, 3.0, 1.0 / 6.0, 0.0), |_| 0.0],
        ),
        (
            "hardswish",
            |x| x.hardswish(),
            [
                |x| x * (x + 3.0).clamp(0.0, 6.0) / 6.0,
                |x| within(x, -3.0, 3.0, (2.0 * x + 3.0) / 6.0, above(x, 0.0, 1.0, 0.0)),
                |x| within(x, -3.0, 3.0, 1.0 / 3.0, 0.0),
            ],
        ),
        (
            "softshrink",
            |x| x.softshrink(0.5),
            [|x| within(x, -0.5, 0.5, 0.0, x - 0.5 * x.signum()), |x| above(x.abs(), 0.5, 1.0, 0.0), |_| 0.0],
        ),
        ("abs", |x| x.abs(), [f64::abs, |x| if x == 0.0 { 0.0 } else { x.signum() }, |_| 0.0]),
        ("sqrt", |x| x.sqrt(), [f64::sqrt, |x| 0.5 / x.sqrt(), |x| -0.25 / x.sqrt() / x]),
        ("rsqrt", |x| x.rsqrt(), [|x| 1.0 / x.sqrt(), |x| -0.5 / x.sqrt() / x, |x| 0.75 / x.sqrt() / x / x]),
        ("recip", |x| x.recip(), [|x| 1.0 / x, |x| -1.0 / x / x, |x| 2.0 / x / x / x]),
        (
            "erfc",
            |x| x.erfc(),
            [
                |x| eval(Unary::Erfc, x),
                |x| -2.0 / PI.sqrt() * (-x * x).exp(),
                |x| times(4.0 / PI.sqrt() * x, (-x * x).exp()),
            ],
        ),
        ("asin", |x| x.asin(), [f64::asin, |x| between(x).sqrt().recip(), |x| x / between(x) / between(x).sqrt()]),
        ("acos", |x| x.acos(), [f64::acos, |x| -between(x).sqrt().recip(), |x| -x / between(x) / between(x).sqrt()]),
        ("asinh", |x| x.asinh(), [asinh, |x| 1f64.hypot(x).recip(), |x| times(-x, 1f64.hypot(x).powi(-3))]),
        (
            "acosh",
            |x| x.acosh(),
            [
                acosh,
                |x| ((x - 1.0).sqrt() * (x + 1.0).sqrt()).recip(),
                |x| -x / (x - 1.0).powf(1.5) / (x + 1.0).powf(1.5),
            ],
        ),
        (
            "atanh",
            |x| x.atanh(),
            [atanh, |x| between(x).recip(), |x| 2.0 * x * between(x).recip() * between(x).recip()],
        ),
        (
            "softsign",
            |x| x.softsign(),
            [
                |x| x / (1.0 + x.abs()),
                |x| (1.0 + x.abs()).recip().powi(2),
                |x| -2.0 * x.signum() * (1.0 + x.abs()).powi(-3),
            ],
        ),
        ("pow 2.5", |x| x.pow(2.5), [|x| x.powf(2.5), |x| 2.5 * x.powf(1.5), |x| 3.75 * x.powf(0.5)]),
        ("pow -1.5", |x| x.pow(-1.5), [|x| x.powf(-1.5), |x| -1.5 * x.powf(-2.5), |x| 3.75 * x.powf(-3.5)]),
        ("pow 4", |x| x.pow(4.0), [|x| x.powi(4), |x| 4.0 * x.powi(3), |x| 12.0 * x * x]),
        (
            "power of 3",
            |x| constant_like(x, 3.0)?.pow(x),
            [|x| 3f64.powf(x), |x| 3f64.powf(x) * 3f64.ln(), |x| 3f64.powf(x) * 3f64.ln() * 3f64.ln()],
        ),
        (
            "atan2(x, 2)",
            |x| x.atan2(2.0),
            [
                |x| x.atan2(2.0),
                |x| 2.0 / x.hypot(2.0) / x.hypot(2.0),
                |x| times(-4.0 * x / (x * x + 4.0), (x * x + 4.0).recip()),
            ],
        ),
        (
            "atan2(2, x)",
            |x| constant_like(x, 2.0)?.atan2(x),
            [
                |x| 2f64.atan2(x),
                |x| -2.0 / x.hypot(2.0) / x.hypot(2.0),
                |x| times(4.0 * x / (x * x + 4.0), (x * x + 4.0).recip()),
            ],
        ),
        (
            "hardshrink",
            |x| x.hardshrink(0.5),
            [|x| above(x.abs(), 0.5, x, 0.0), |x| above(x.abs(), 0.5, 1.0, 0.0), |_| 0.0],
        ),
    ]
}
