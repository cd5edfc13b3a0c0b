//! Functions at the ends of their domains: zeros of both signs, the smallest numbers, bounds, far out in both
//! directions, infinities.
//! Values, gradients and second gradients of `f32` and `f64` are compared with closed forms in `f64`.

use crate::common::{cpu, values};
use autograd::{Var, backward, differentiable_grad, grad};
use numcore::{
    DType, Result, Tensor,
    ops::{PointwiseOps, PoolOps, ReduceOps},
    pointwise::Number,
};
use runtime_cpu::Cpu;
use table::{CONVENTIONS, table};

mod table;

type V = Var<Cpu>;

fn leaf(points: &[f64]) -> V {
    leaf_of(DType::F32, points)
}

fn leaf_of(dtype: DType, points: &[f64]) -> V {
    let points = Tensor::from_slice(&cpu(), [points.len()], points).unwrap();
    Var::leaf("x", points.to_dtype(dtype).unwrap()).unwrap()
}

/// Ends of domains and of ranges.
const FAR: [f64; 20] = [
    0.0,
    1e-45,
    f32::MIN_POSITIVE as f64,
    1e-20,
    1e-3,
    0.5,
    1.0 - 1.0 / (1 << 24) as f64,
    1.0,
    1.0 + 1.0 / (1 << 23) as f64,
    3.0,
    6.0,
    9.0,
    15.0,
    40.0,
    80.0,
    1e4,
    1e10,
    1e19,
    f32::MAX as f64,
    f64::INFINITY,
];
/// Points that are tried in `f64` alone.
const FARTHER: [f64; 8] = [5e-324, f64::MIN_POSITIVE, 1e-200, 1e-160, 700.0, 1e160, 1e200, f64::MAX];

/// Value, gradient and second gradient at each point; 0 where there is none.
fn orders(f: fn(&V) -> Result<V>, x: &V) -> Result<[Vec<f64>; 3]> {
    let y = f(x)?;
    let none = || vec![0.0; x.dims()[0]];
    let Some(first) = differentiable_grad(&[&y.sum_all()?], &[x])?.remove(0) else {
        return Ok([values(&y), none(), none()]);
    };
    let second = match first.requires_grad() {
        true => grad(&[&first.sum_all()?], &[x])?.remove(0),
        false => None,
    };
    Ok([values(&y), values(&first), second.map_or_else(none, |second| values(&second))])
}

/// Close to a relative error; where a curvature passes through 0 near the origin, to an absolute one, as
/// where digits of `tanhshrink` cancel. A value or slope of 0 is 0.
fn near(dtype: DType, name: &str, x: f64, order: usize, got: f64, want: f64) -> bool {
    if want == 0.0 && order < 2 {
        return got == 0.0;
    }
    let (epsilon, tiny) = match dtype {
        DType::F64 => (f64::EPSILON, f64::MIN_POSITIVE),
        _ => (f64::from(f32::EPSILON), f64::from(f32::MIN_POSITIVE)),
    };
    let bound = epsilon * (32.0 + 8.0 * (x * x).min(2000.0));
    let cancels = order == 2 && x.abs() < 2.0 || name == "tanhshrink" && x.abs() < 0.1;
    let slack = if cancels { 8.0 * epsilon } else { tiny };
    got == want || (got - want).abs() <= (bound * want.abs()).max(slack)
}

#[test]
fn functions_have_their_limits_at_all_ends() {
    let mut wrong = Vec::new();
    for dtype in [DType::F32, DType::F64] {
        let farther = if dtype == DType::F64 { &FARTHER[..] } else { &[] };
        let points: Vec<f64> = FAR.iter().chain(farther).flat_map(|&x| [x, -x]).collect();
        let (x, rounded) = (leaf_of(dtype, &points), |x: f64| Number::Float(x).cast(dtype).to_f64());
        for (name, f, closed) in table() {
            let got = orders(f, &x).unwrap();
            for (order, of_order) in closed.into_iter().enumerate() {
                for (&x, &got) in points.iter().zip(&got[order]) {
                    // Outside of a domain slopes are of nothing.
                    if order > 0 && x.is_finite() && closed[0](rounded(x)).is_nan() {
                        continue;
                    }
                    // Where a closed form has no value at an infinity, that is its limit.
                    let want = of_order(rounded(x));
                    let want =
                        if want.is_nan() && x.is_infinite() { of_order(x.clamp(-f64::MAX, f64::MAX)) } else { want };
                    let want = rounded(want);
                    let same = near(dtype, name, x, order, got, want) || (got.is_nan() && want.is_nan());
                    if !same && !CONVENTIONS.contains(&(name, x, order)) {
                        wrong.push(format!("{name} {dtype}, order {order}, at {x:e}: {got:e}, due {want:e}"));
                    }
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
    let narrow = [1e-38, 1e-30, 1e-19, 1.0, 1e19, 1e37].map(|size| (DType::F32, size));
    let wide = [1e-306, 1e-160, 1e160, 1e306].map(|size| (DType::F64, size));
    for (dtype, size) in narrow.into_iter().chain(wide) {
        let x = leaf_of(dtype, &[3.0 * size, 4.0 * size]);
        let rows: [(V, f64, [f64; 2]); 2] = [
            (x.norm_all().unwrap(), 5.0, [0.6, 0.8]),
            (x.std_all(1).unwrap(), 0.5f64.sqrt(), [-0.5f64.sqrt(), 0.5f64.sqrt()]),
        ];
        for (y, value, slopes) in rows {
            let got = values(&grad(&[&y], &[&x]).unwrap().remove(0).unwrap());
            let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-5;
            let near = close(values(&y)[0], value * size) && got.iter().zip(slopes).all(|(&a, b)| close(a, b));
            assert!(near, "{size}: {:?} {got:?}", values(&y));
        }
    }
    let x = leaf(&[0.0, 0.0]);
    let first = differentiable_grad(&[&x.norm_all().unwrap()], &[&x]).unwrap().remove(0).unwrap();
    let second = first.requires_grad().then(|| grad(&[&first.sum_all().unwrap()], &[&x]).unwrap().remove(0));
    let second = second.flatten().map_or(vec![0.0; 2], |second| values(&second));
    assert_eq!((values(&first), second), (vec![0.0; 2], vec![0.0; 2]));
}

#[test]
fn equal_numbers_have_no_variance() {
    for (x, n) in [(3e38, 2), (-3e38, 3), (f64::from(f32::MAX), 5), (1e-35, 4), (0.1, 7), (0.0, 3)] {
        let x = leaf(&vec![x; n]);
        for y in [x.var_all(1), x.var_all(0), x.std_all(1)] {
            assert_eq!(values(&y.unwrap()), [0.0], "{n} of {:?}", values(&x)[0]);
        }
    }
    let far = leaf(&[3e38, -3e38, 3e38, -3e38]);
    let std = values(&far.std_all(0).unwrap())[0];
    assert!((std / 3e38 - 1.0).abs() < 1e-6, "{std}");
}

/// Regions of different sizes are padded.
#[test]
fn means_of_regions_keep_infinities() {
    let x = Tensor::from_slice(&cpu(), [1, 1, 5], &[1.0f32, 2.0, 3.0, 4.0, f32::INFINITY]).unwrap();
    let means = x.adaptive_avg_pool([3]).unwrap();
    assert_eq!((means.dtype(), means.to_f64s().unwrap()), (DType::F32, vec![1.5, 3.0, f64::INFINITY]));
}
