//! Functions at the ends of their domains: zeros of both signs, the smallest numbers, bounds, far out in both directions,
//! infinities.
//! Values, gradients and second gradients of `f32` are compared with closed forms in `f64`.

use std::f64::consts::{FRAC_1_SQRT_2, LN_2, PI};

use crate::common::{cpu, values};
use autograd::{Var, backward, grad};
use numcore::{
    DType, Result, Tensor,
    ops::{PointwiseOps, PoolOps, ReduceOps},
    pointwise::{Number, Unary},
};
use runtime_cpu::Cpu;

type V = Var<Cpu>;
type Closed = fn(f64) -> f64;

/// A function, and its value, slope and curvature.
type Row = (&'static str, fn(&V) -> Result<V>, [Closed; 3]);

/// A place where a convention stands in for the limit: function, point, order of the derivative.
const CONVENTIONS: &[(&str, f64, usize)] = &[
    ("silu", f64::NEG_INFINITY, 0),
    ("gelu", f64::NEG_INFINITY, 0),
    ("gelu_tanh", f64::NEG_INFINITY, 0),
    ("mish", f64::NEG_INFINITY, 0),
    ("hardswish", f64::NEG_INFINITY, 0),
    ("atan", f64::INFINITY, 2),
    ("atan", f64::NEG_INFINITY, 2),
    ("erf", f64::INFINITY, 2),
    ("erf", f64::NEG_INFINITY, 2),
];

fn leaf(points: &[f64]) -> V {
    let points: Vec<f32> = points.iter().map(|&x| x as f32).collect();
    Var::leaf("x", Tensor::from_slice(&cpu(), [points.len()], &points).unwrap()).unwrap()
}

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

/// `sech²(softplus) · sigmoid`, and its slope.
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

fn table() -> Vec<Row> {
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
        (
            "hardshrink",
            |x| x.hardshrink(0.5),
            [|x| above(x.abs(), 0.5, x, 0.0), |x| above(x.abs(), 0.5, 1.0, 0.0), |_| 0.0],
        ),
    ]
}

const TINY: f64 = f32::MIN_POSITIVE as f64;
const FAR: [f64; 17] = [
    0.0,
    1e-45,
    TINY,
    1e-20,
    1e-3,
    0.5,
    1.0,
    3.0,
    6.0,
    9.0,
    15.0,
    40.0,
    80.0,
    1e10,
    1e19,
    f32::MAX as f64,
    f64::INFINITY,
];

/// Value, gradient and second gradient at each point; 0 where there is none.
fn orders(f: fn(&V) -> Result<V>, points: &[f64]) -> Result<[Vec<f64>; 3]> {
    let x = leaf(points);
    let y = f(&x)?;
    let none = || vec![0.0; points.len()];
    let Some(first) = grad(&[&y.sum_all()?], &[&x], true)?.remove(0) else { return Ok([values(&y), none(), none()]) };
    let second = match first.requires_grad() {
        true => grad(&[&first.sum_all()?], &[&x], false)?.remove(0),
        false => None,
    };
    Ok([values(&y), values(&first), second.map_or_else(none, |second| values(&second))])
}

/// Close to a relative error; where a curvature passes through 0 near the origin, to an absolute one, as
/// where digits of `tanhshrink` cancel. A value or slope of 0 is 0.
fn near(name: &str, x: f64, order: usize, got: f64, want: f64) -> bool {
    if want == 0.0 && order < 2 {
        return got == 0.0;
    }
    let want = f64::from(want as f32);
    let bound = f64::from(f32::EPSILON) * (32.0 + 8.0 * (x * x).min(2000.0));
    let cancels = order == 2 && x.abs() < 2.0 || name == "tanhshrink" && x.abs() < 0.1;
    let slack = if cancels { 1e-6 } else { TINY };
    got == want || (got - want).abs() <= (bound * want.abs()).max(slack)
}

#[test]
fn functions_have_their_limits_at_all_ends() {
    let points: Vec<f64> = FAR.iter().flat_map(|&x| [x, -x]).collect();
    let mut wrong = Vec::new();
    for (name, f, closed) in table() {
        let got = orders(f, &points).unwrap();
        for (order, closed) in closed.into_iter().enumerate() {
            for (&x, &got) in points.iter().zip(&got[order]) {
                // Where a closed form has no value at an infinity, that is its limit.
                let of = |x: f64| closed(f64::from(x as f32));
                let want = if of(x).is_nan() && x.is_infinite() { closed(x.clamp(-1e100, 1e100)) } else { of(x) };
                let same = near(name, x, order, got, want) || (got.is_nan() && want.is_nan());
                if !same && !CONVENTIONS.contains(&(name, x, order)) {
                    wrong.push(format!("{name}, order {order}, at {x:e}: {got:e}, due {want:e}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_huge_number_and_a_gradient_meet_no_infinity() {
    let functions: [fn(&V) -> Result<V>; 4] = [|x| x.silu(), |x| x.gelu(), |x| x.gelu_tanh(), |x| x.mish()];
    for f in functions {
        let x = leaf(&[3e38, -3e38]);
        let gradients = backward(&f(&x).unwrap().mul(3.0).unwrap().sum_all().unwrap()).unwrap();
        assert_eq!(gradients.of(&x).unwrap().to_f64s().unwrap(), [3.0, 0.0]);
    }
}

#[test]
fn norms_and_deviations_are_exact_where_squares_are_not() {
    for size in [1e-38, 1e-30, 1e-19, 1.0, 1e19, 1e37] {
        let x = leaf(&[3.0 * size, 4.0 * size]);
        let rows: [(V, f64, [f64; 2]); 2] = [
            (x.norm(&[], false).unwrap(), 5.0, [0.6, 0.8]),
            (x.std(&[], 1, false).unwrap(), 0.5f64.sqrt(), [-0.5f64.sqrt(), 0.5f64.sqrt()]),
        ];
        for (y, value, slopes) in rows {
            let got = values(&grad(&[&y], &[&x], false).unwrap().remove(0).unwrap());
            let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-5;
            let near = close(values(&y)[0], value * size) && got.iter().zip(slopes).all(|(&a, b)| close(a, b));
            assert!(near, "{size}: {:?} {got:?}", values(&y));
        }
    }
    let x = leaf(&[0.0, 0.0]);
    let first = grad(&[&x.norm(&[], false).unwrap()], &[&x], true).unwrap().remove(0).unwrap();
    let second = first.requires_grad().then(|| grad(&[&first.sum_all().unwrap()], &[&x], false).unwrap().remove(0));
    let second = second.flatten().map_or(vec![0.0; 2], |second| values(&second));
    assert_eq!((values(&first), second), (vec![0.0; 2], vec![0.0; 2]));
}

#[test]
fn equal_numbers_have_no_variance() {
    for (x, n) in [(3e38, 2), (-3e38, 3), (f64::from(f32::MAX), 5), (1e-35, 4), (0.1, 7), (0.0, 3)] {
        let x = leaf(&vec![x; n]);
        for y in [x.var(&[], 1, false), x.var(&[], 0, false), x.std(&[], 1, false)] {
            assert_eq!(values(&y.unwrap()), [0.0], "{n} of {:?}", values(&x)[0]);
        }
    }
    let far = leaf(&[3e38, -3e38, 3e38, -3e38]);
    let std = values(&far.std(&[], 0, false).unwrap())[0];
    assert!((std / 3e38 - 1.0).abs() < 1e-6, "{std}");
}

/// Regions of different sizes are padded.
#[test]
fn means_of_regions_keep_infinities() {
    let x = Tensor::from_slice(&cpu(), [1, 1, 5], &[1.0f32, 2.0, 3.0, 4.0, f32::INFINITY]).unwrap();
    let means = x.adaptive_avg_pool([3]).unwrap();
    assert_eq!((means.dtype(), means.to_f64s().unwrap()), (DType::F32, vec![1.5, 3.0, f64::INFINITY]));
}
