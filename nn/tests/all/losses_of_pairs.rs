//! Losses of signs, counts, pairs and triples against PyTorch's values and gradients.

use autograd::{Var, grad, hvp};
use nn::loss::{self, BinaryOptions, Reduction, TripletOptions};
use numcore::{
    DType, Result, Tensor,
    fused::NnOps,
    ops::{DistanceOps, PointwiseOps, ReduceOps},
};

use crate::common::{V, cpu, f64s, made};

fn constant(x: &V) -> V {
    Var::new(x.value().unwrap())
}

/// 1 where `x` is positive, −1 elsewhere.
fn sign(x: &V) -> V {
    constant(&x.sign().unwrap())
}

type LossFn<'f> = Box<dyn Fn(&[V]) -> Result<V> + 'f>;

#[test]
fn values_and_gradients_are_pytorchs() {
    let [a, b, c] = [0, 1, 2].map(|k| made(k, &[4, 3]));
    let row = constant(&made(3, &[3]));
    let (ones, signs, sign_of_rows) =
        (constant(&b).gt(0.0).unwrap().to_dtype(DType::F64).unwrap(), sign(&b), sign(&made(4, &[4])));
    let positive = constant(&a).abs().unwrap().add(0.2).unwrap();
    let above = constant(&row.add(2.0).unwrap());
    let (mean, sum) = (Reduction::Mean, Reduction::Sum);
    let other = constant(&b);
    let cases: Vec<(&str, Vec<&V>, LossFn<'_>)> = vec![
        (
            "weighted_bce",
            vec![&a],
            Box::new(|x| {
                let options = BinaryOptions { weight: Some(&positive), pos_weight: Some(&above), reduction: mean };
                loss::bce_with_logits_by(&x[0], &ones, options)
            }),
        ),
        (
            "weighted_bce_sum",
            vec![&a],
            Box::new(|x| {
                let options = BinaryOptions { weight: Some(&above), reduction: sum, ..Default::default() };
                loss::bce_with_logits_by(&x[0], &ones, options)
            }),
        ),
        ("focal", vec![&a], Box::new(|x| loss::focal(&x[0], &ones, 2.0, 0.25, sum))),
        ("focal_plain", vec![&a], Box::new(|x| loss::focal(&x[0], &ones, 1.5, None, mean))),
        ("dice", vec![&a], Box::new(|x| loss::dice(&x[0].sigmoid()?, &ones, 0.5))),
        ("soft_margin", vec![&a], Box::new(|x| loss::soft_margin(&x[0], &signs, mean))),
        ("hinge_embedding", vec![&a], Box::new(|x| loss::hinge_embedding(&x[0], &signs, 0.4, mean))),
        ("poisson_nll", vec![&a], Box::new(|x| loss::poisson_nll(&x[0], &positive, mean))),
        (
            "gaussian_nll",
            vec![&a, &c],
            Box::new(|x| loss::gaussian_nll(&x[0], &other, &x[1].abs()?.add(0.3)?, 1e-6, mean)),
        ),
        ("margin_ranking", vec![&a, &c], Box::new(|x| loss::margin_ranking(&x[0], &x[1], &signs, 0.3, mean))),
        ("cosine_embedding", vec![&a, &b], Box::new(|x| loss::cosine_embedding(&x[0], &x[1], &sign_of_rows, 0.2, sum))),
        ("triplet", vec![&a, &b, &c], Box::new(|x| loss::triplet(&x[0], &x[1], &x[2], TripletOptions::default()))),
        (
            "triplet_swapped",
            vec![&a, &b, &c],
            Box::new(|x| {
                let options = TripletOptions { margin: 0.5, p: 1.0, swap: true, reduction: sum };
                loss::triplet(&x[0], &x[1], &x[2], options)
            }),
        ),
        ("info_nce", vec![&a, &b], Box::new(|x| loss::info_nce(&x[0], &x[1], 0.1))),
        (
            "soft_cross_entropy",
            vec![&a, &b],
            Box::new(|x| loss::soft_cross_entropy(&x[0], &x[1].softmax(1)?, 0.0, Reduction::Mean)),
        ),
        (
            "soft_cross_entropy_smoothed",
            vec![&a],
            Box::new(|x| loss::soft_cross_entropy(&x[0], &positive, 0.2, Reduction::Sum)),
        ),
        ("cosine_similarity", vec![&a, &b], Box::new(|x| x[0].cosine_similarity(&x[1], 0)?.sum_all())),
        ("normalize", vec![&a], Box::new(|x| x[0].normalize(1)?.mul(&other)?.sum_all())),
    ];
    let all: serde_json::Value = serde_json::from_str(include_str!("losses_of_pairs.json")).unwrap();
    assert_eq!(all.as_object().unwrap().len(), cases.len());
    for (name, inputs, f) in &cases {
        let of = |v: &serde_json::Value| v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
        let owned: Vec<V> = inputs.iter().map(|x| (*x).clone()).collect();
        let loss = f(&owned).unwrap();
        let want = all[name]["loss"].as_f64().unwrap();
        // PyTorch's cosine embedding adds 1e-12 to squared norms.
        let bound = if *name == "cosine_embedding" { 1e-10 } else { 1e-12 };
        assert!((loss.item().unwrap() - want).abs() < bound, "{name}: {}, expected {want}", loss.item().unwrap());
        for (k, got) in grad(&[&loss], inputs).unwrap().iter().enumerate() {
            let (got, want) = (f64s(got.as_ref().unwrap()), of(&all[name]["gradients"][k]));
            let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
            assert!(got.len() == want.len() && worst < bound, "{name}: gradient {k} is off by {worst}");
        }
        // Second derivatives exist, and are finite.
        let second = hvp(|x| f(x), inputs, inputs).unwrap();
        assert!(second.iter().flat_map(f64s).all(f64::is_finite), "{name}");
    }
}

#[test]
fn extremes_are_finite_and_misuse_is_told() {
    let [x, y] = [[200.0, -200.0, 0.0], [1.0, 0.0, 1.0]]
        .map(|v| Var::leaf("x", Tensor::from_slice(&cpu(), [3], &v).unwrap()).unwrap());
    for gamma in [0.0, 0.5, 2.0] {
        let losses = loss::focal(&x, &y, gamma, None, Reduction::None).unwrap();
        assert!(f64s(&losses).iter().all(|l| l.is_finite()), "{:?}", f64s(&losses));
        assert!(f64s(&losses)[..2].iter().all(|l| *l < 1e-80), "{:?}", f64s(&losses));
    }
    let zero = made(0, &[2, 3]).mul(0.0).unwrap();
    let cos = zero.cosine_similarity(&made(1, &[2, 3]), -1).unwrap();
    assert_eq!(f64s(&cos), [0.0, 0.0]);
    let slope = grad(&[&zero.normalize(-1).unwrap().sum_all().unwrap()], &[&zero]).unwrap();
    assert!(f64s(slope[0].as_ref().unwrap()).iter().all(|g| g.is_finite()));
    let says = |result: Result<V>, words: &[&str]| {
        let error = result.unwrap_err().to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    };
    let (rows, others) = (made(0, &[4, 3]), made(1, &[4, 2]));
    says(loss::info_nce(&rows, &others, 0.1), &["info_nce", "[4, 3]", "[4, 2]"]);
    says(loss::soft_cross_entropy(&rows, &others, 0.0, Reduction::Mean), &["soft_cross_entropy", "[4, 3]", "[4, 2]"]);
    says(loss::soft_cross_entropy(&rows, &rows, 1.5, Reduction::Mean), &["smoothing", "from 0 to 1"]);
    says(loss::info_nce(&rows, &rows, 0.0), &["temperature", "positive"]);
    says(loss::focal(&x, &y, -1.0, None, Reduction::Mean), &["gamma", "at least 0"]);
    says(loss::focal(&x, &y, 1.0, 1.5, Reduction::Mean), &["alpha", "in 0..=1"]);
    says(loss::triplet(&x, &y, &x, TripletOptions::default()), &["rows [N, D]"]);
    says(loss::margin_ranking(&x, &y, &rows, 0.0, Reduction::Mean), &["margin_ranking", "[3]", "[4, 3]"]);
    says(loss::dice(&x.sum_all().unwrap(), &y.sum_all().unwrap(), 1.0), &["dice", "axis of examples"]);
}
