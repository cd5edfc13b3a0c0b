//! Losses against PyTorch's values and gradients.

use crate::common::{Case, Goldens, T, V, cpu, f64s};
use nn::loss::{self, CrossEntropyOptions, NllOptions, Reduction};
use numcore::{
    DType, Result,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};

fn reduction(case: &Case) -> Reduction {
    match case.attr("reduction").as_str() {
        None | Some("mean") => Reduction::Mean,
        Some("sum") => Reduction::Sum,
        Some(_) => Reduction::None,
    }
}

fn elementwise(op: &str, f: impl Fn(&Case, &V, &V) -> Result<V>) {
    for case in Goldens::read(&cpu(), "loss").of(op) {
        let x = case.input(0);
        let y = V::new(case.get("in1"));
        case.check(&f(&case, &x, &y).unwrap(), &[(0, &x)]);
    }
}

#[test]
fn elementwise_losses() {
    elementwise("mse", |c, x, y| loss::mse(x, y, reduction(c)));
    elementwise("l1", |c, x, y| loss::l1(x, y, reduction(c)));
    elementwise("smooth_l1", |c, x, y| loss::smooth_l1(x, y, c.number("beta"), reduction(c)));
    elementwise("huber", |c, x, y| loss::huber(x, y, c.number("delta"), reduction(c)));
    elementwise("bce_with_logits", |c, x, y| loss::bce_with_logits(x, y, reduction(c)));
    elementwise("kl_div", |_, x, y| loss::kl_div_batchmean(x, y));
}

fn column(values: &[f32]) -> T {
    numcore::Tensor::from_slice(&cpu(), [values.len()], values).unwrap()
}

fn values_and_slopes(f: impl Fn(&V, &V) -> Result<V>, x: &[f32], y: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let x = V::leaf("x", column(x)).unwrap();
    let losses = f(&x, &V::new(column(y))).unwrap();
    let gradients = losses.sum_all().unwrap().backward().unwrap();
    (f64s(&losses), gradients.of(&x).unwrap().to_f64s().unwrap())
}

/// The slope of a logit is `sigmoid(x) − y` everywhere, also at the kink of the stable formula and where `exp` would
/// overflow.
#[test]
fn bce_with_logits_is_smooth_and_finite() {
    let (x, y) = ([0.0, 0.0, 200.0, -200.0, 200.0, -200.0], [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
    let (losses, slopes) = values_and_slopes(|x, y| loss::bce_with_logits(x, y, Reduction::None), &x, &y);
    let ln2 = f64::from(std::f32::consts::LN_2);
    let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(close(&losses, &[ln2, ln2, 0.0, 0.0, 200.0, 200.0]), "{losses:?}");
    assert!(close(&slopes, &[0.5, -0.5, 0.0, 0.0, 1.0, -1.0]), "{slopes:?}");
    // Small losses are `e^−|x|` and keep their digits; so do their slopes.
    let (x, y) = ([-20.0, 20.0, -80.0, 80.0], [0.0, 1.0, 0.0, 1.0]);
    let (losses, slopes) = values_and_slopes(|x, y| loss::bce_with_logits(x, y, Reduction::None), &x, &y);
    for (i, x) in x.iter().map(|&x| f64::from(x)).enumerate() {
        let due = (-x.abs()).exp();
        let near = (losses[i] / due - 1.0).abs() < 1e-6 && (slopes[i] / -due.copysign(x) - 1.0).abs() < 1e-6;
        assert!(near, "{x}: {} and {}", losses[i], slopes[i]);
    }
}

/// The sum of equal losses is exact here, and so must be their mean.
#[test]
fn the_mean_of_equal_losses_is_the_loss() {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for n in [6, 11, 49, 71, 100] {
            let [x, y] = [3.0, 1.0].map(|v| T::full(&cpu(), [n], dtype, v).unwrap());
            let losses = [
                (loss::mse(&x, &y, Reduction::Mean), 4.0),
                (loss::l1(&x, &y, Reduction::Mean), 2.0),
                (loss::smooth_l1(&x, &y, 1.0, Reduction::Mean), 1.5),
                (loss::kl_div_batchmean(&x, &y), -3.0),
            ];
            losses
                .into_iter()
                .for_each(|(loss, due)| assert_eq!(loss.unwrap().to_f64s().unwrap(), [due], "{dtype} {n}"));
        }
    }
    // A sum that f16 does not hold.
    let [x, y] = [0.0, 40.0].map(|v| T::full(&cpu(), [100], DType::F16, v).unwrap());
    assert_eq!(loss::mse(&x, &y, Reduction::Mean).unwrap().to_f64s().unwrap(), [1600.0]);
}

/// The slope `2 (x − y) g / n` of halves is rounded once: neither `g / n`, which may vanish, nor `1 / n` is.
#[test]
fn the_slope_of_a_mean_of_halves_is_rounded_once() {
    for (n, g) in [(3, 1.0), (7, 1.0), (49, 1.0), (64, f64::exp2(-20.0))] {
        let y = V::new(T::full(&cpu(), [n], DType::F16, -100.0).unwrap());
        let x = V::leaf("x", T::zeros(&cpu(), [n], DType::F16).unwrap()).unwrap();
        let loss = loss::mse(&x, &y, Reduction::Mean).unwrap().mul(g).unwrap();
        let due = T::full(&cpu(), [n], DType::F16, 200.0 * g / n as f64).unwrap();
        let gradients = loss.backward().unwrap();
        let slopes = gradients.of(&x).unwrap();
        assert_eq!((slopes.dtype(), slopes.to_f64s().unwrap()), (DType::F16, due.to_f64s().unwrap()), "{n} {g}");
    }
}

/// PyTorch refuses them.
#[test]
fn losses_outside_of_their_domains() {
    let [x, y] = [[2.0, -3.0, 0.5], [1.0, 0.0, 1.0]].map(|v| column(&v));
    let losses = loss::bce(&x, &y, Reduction::None).unwrap().to_f64s().unwrap();
    assert!(losses[0].is_nan() && losses[1].is_nan() && losses[2] > 0.0, "{losses:?}");
    for delta in [0.0, -1.0, f64::NAN] {
        assert!(loss::huber(&x, &y, delta, Reduction::Mean).unwrap_err().to_string().contains("huber: delta"));
    }
    for beta in [-1.0, f64::NAN] {
        assert!(loss::smooth_l1(&x, &y, beta, Reduction::Mean).unwrap_err().to_string().contains("smooth_l1: beta"));
    }
    // Below the normal numbers of `f32`.
    let (_, slopes) = values_and_slopes(|x, y| loss::smooth_l1(x, y, 1e-40, Reduction::None), &[2.0, 1.0], &[1.0, 1.0]);
    assert_eq!(slopes, [1.0, 0.0]);
}

#[test]
fn bce_ends_at_a_hundred() {
    let (x, y) = ([0.0, 1.0, 0.0, 1.0, 0.25], [0.0, 1.0, 1.0, 0.0, 1.0]);
    let (losses, slopes) = values_and_slopes(|x, y| loss::bce(x, y, Reduction::None), &x, &y);
    let want = [0.0, 0.0, 100.0, 100.0, 4f64.ln()];
    assert!(losses.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{losses:?}");
    assert!(slopes.iter().all(|s| s.is_finite()) && (slopes[4] + 4.0).abs() < 1e-5, "{slopes:?}");
}

#[test]
fn kl_div_of_a_zero_probability_is_zero() {
    let (losses, slopes) = values_and_slopes(|x, y| loss::kl_div(x, y, Reduction::None), &[-1.0, -2.0], &[0.0, 0.5]);
    assert_eq!((losses[0], slopes[0], slopes[1]), (0.0, 0.0, -0.5));
    assert!((losses[1] - 0.5 * (0.5f64.ln() + 2.0)).abs() < 1e-6);
}

#[test]
fn smooth_l1_without_a_bend_is_l1() {
    let (losses, slopes) =
        values_and_slopes(|x, y| loss::smooth_l1(x, y, 0.0, Reduction::None), &[2.0, 1.0], &[1.0, 1.0]);
    assert_eq!((losses, slopes), (vec![1.0, 0.0], vec![1.0, 0.0]));
}

/// Formulas, with an ignored row whose value would be infinite, and class weights.
#[test]
fn nll_with_weights_and_ignored_rows() {
    let rt = cpu();
    let x =
        numcore::Tensor::from_slice(&rt, [2, 2, 2], &[-0.1f32, -2.0, -1.0, -0.5, f32::NEG_INFINITY, -1.0, -3.0, -0.2])
            .unwrap();
    let y = numcore::Tensor::from_slice(&rt, [2, 2], &[0i64, 1, -7, 0]).unwrap();
    let w = column(&[2.0, 3.0]);
    let of = |reduction| {
        let options = NllOptions { ignore_index: -7, reduction };
        loss::weighted_nll(&x, &y, &w, options).unwrap().to_f64s().unwrap()
    };
    let (none, mean) = (of(Reduction::None), of(Reduction::Mean)[0]);
    assert!(none.iter().zip([0.2, 1.5, 0.0, 6.0]).all(|(a, b)| (a - b).abs() < 1e-6), "{none:?}");
    assert!((mean - 7.7 / 7.0).abs() < 1e-6 && (of(Reduction::Sum)[0] - 7.7).abs() < 1e-5);
}

#[test]
fn shapes_that_would_broadcast_are_refused() {
    let rt = cpu();
    let (x, y) = (numcore::Tensor::zeros(&rt, [3, 1], DType::F32).unwrap(), column(&[0.0; 3]));
    let e = loss::mse(&x, &y, Reduction::Mean).unwrap_err().to_string();
    assert!(e.contains("mse: shapes [3, 1], [3]"), "{e}");
    assert!(loss::cross_entropy(&x, &x).unwrap_err().to_string().contains("[.., C]"));
}

/// A loss of a sequence model: classes on the last axis, after any number of axes.
#[test]
fn cross_entropy_of_more_axes() {
    let rt = cpu();
    let x = numcore::Tensor::uniform(&rt, [2, 3, 5], DType::F32, -1.0, 1.0, 1).unwrap();
    let y = numcore::Tensor::from_slice(&rt, [2, 3], &[0i64, 1, 2, 3, 4, 0]).unwrap();
    let flat = loss::cross_entropy(&x.reshape([6, 5]).unwrap(), &y.reshape([6]).unwrap()).unwrap();
    assert_eq!(loss::cross_entropy(&x, &y).unwrap().item().unwrap(), flat.item().unwrap());
    let none = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
    assert_eq!(loss::cross_entropy_with(&x, &y, none).unwrap().dims(), [2, 3]);
}

/// The loss of half-precision logits is that of the same numbers in `f32`, and its gradient rounded once.
#[test]
fn cross_entropy_of_halves_is_computed_and_stored_in_f32() {
    let rt = cpu();
    let y = V::new(numcore::Tensor::from_slice(&rt, [4], &[0i64, -100, 2, 6]).unwrap());
    for (half, reduction) in [DType::BF16, DType::F16]
        .into_iter()
        .flat_map(|half| [Reduction::Mean, Reduction::Sum, Reduction::None].map(|reduction| (half, reduction)))
    {
        let x = numcore::Tensor::uniform(&rt, [4, 7], DType::F32, -3.0, 3.0, 1).unwrap().to_dtype(half).unwrap();
        let options = CrossEntropyOptions { reduction, label_smoothing: 0.1, ..Default::default() };
        let of = |x: numcore::Tensor<_>| {
            let x = V::leaf("x", x).unwrap();
            let loss = loss::cross_entropy_with(&x, &y, options).unwrap();
            let gradient = autograd::grad(&[&loss.sum_all().unwrap()], &[&x]).unwrap().remove(0).unwrap();
            (loss, gradient.value().unwrap())
        };
        let ((loss, gradient), (wide, exact)) = (of(x.clone()), of(x.to_dtype(DType::F32).unwrap()));
        assert_eq!((loss.dtype(), gradient.dtype()), (DType::F32, half));
        assert_eq!(f64s(&loss), f64s(&wide));
        assert_eq!(gradient.to_f64s().unwrap(), exact.to_dtype(half).unwrap().to_f64s().unwrap());
    }
}

#[test]
fn losses_of_classes() {
    let goldens = Goldens::read(&cpu(), "loss");
    for case in goldens.of("cross_entropy") {
        let (x, y) = (case.input(0), case.input(1));
        let options = CrossEntropyOptions {
            ignore_index: case.attr("ignore_index").as_i64().unwrap_or(-100),
            label_smoothing: case.attr("label_smoothing").as_f64().unwrap_or(0.0),
            reduction: reduction(&case),
        };
        let weighted = case.case["inputs"] == 3;
        let loss = match weighted {
            true => loss::weighted_cross_entropy(&x, &y, &V::new(case.get("in2")), options),
            false => loss::cross_entropy_with(&x, &y, options),
        };
        case.check(&loss.unwrap(), &[(0, &x)]);
    }
    for case in goldens.of("nll") {
        let (x, y) = (case.input(0), case.input(1));
        case.check(&loss::nll(&x, &y, NllOptions::default()).unwrap(), &[(0, &x)]);
    }
}
