//! Losses of preferences and of policies against PyTorch's values and gradients, and what holds at the start.

use autograd::{Var, grad};
use nn::loss::{self, CrossEntropyOptions, DpoOptions, KtoOptions, PolicyOptions, Reduction, TokenMean};
use numcore::{
    DType, Result, Tensor,
    fused::NnOps,
    ops::{MatmulOps, PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;

use crate::common::{cpu, f64s};

type V = Var<Cpu>;

/// Input `k`, whose element `i` is `−1.5 − sin(1.3 i + 0.7 k + 0.5)`.
fn made(k: usize, shape: &[usize]) -> V {
    let mut i = 0.0;
    let next = || {
        i += 1.0;
        -1.5 - f64::sin(1.3 * (i - 1.0) + 0.7 * k as f64 + 0.5)
    };
    Var::leaf(&format!("in{k}"), Tensor::from_f64_fn(&cpu(), shape, DType::F64, next).unwrap()).unwrap()
}

fn fixed(x: &V) -> V {
    Var::new(x.value().unwrap())
}

fn numbers(values: &[f64]) -> V {
    Var::new(Tensor::from_slice(&cpu(), [values.len()], values).unwrap())
}

type LossFn<'f> = Box<dyn Fn(&[&V]) -> Result<V> + 'f>;

#[test]
fn values_and_gradients_are_pytorchs() {
    let [c, r, c0, r0] = [0, 1, 2, 3].map(|k| made(k, &[5]));
    let [new, old, reference] = [0, 1, 2].map(|k| made(k, &[3, 4]));
    let [old, reference] = [fixed(&old), fixed(&reference)];
    let liked = numbers(&[1.0, 0.0, 1.0, 1.0, 0.0]).gt(0.0).unwrap();
    let advantages = fixed(&made(5, &[3, 1]).add(1.5).unwrap());
    let of_tokens = fixed(&made(6, &[3, 4]).add(1.5).unwrap());
    let rows = Var::new(Tensor::from_slice(&cpu(), [3, 1], &[1.0, 1.0, 0.0]).unwrap());
    let mask =
        fixed(&made(4, &[3, 4])).gt(-1.9).unwrap().to_dtype(DType::F64).unwrap().mul(&rows).unwrap().gt(0.0).unwrap();
    let mean = Reduction::Mean;
    let kto = |undesirable, desirable| KtoOptions { beta: 0.3, desirable, undesirable, reduction: mean };
    let policy = |high, kl, mean| PolicyOptions { clip: [0.2, high], kl, mean };
    let cases: Vec<(&str, Vec<&V>, LossFn<'_>)> = vec![
        ("dpo", vec![&c, &r, &c0, &r0], Box::new(|x| loss::dpo([x[0], x[1]], [x[2], x[3]], DpoOptions::default()))),
        (
            "dpo_smoothed",
            vec![&c, &r, &c0, &r0],
            Box::new(|x| {
                let options = DpoOptions { beta: 0.7, label_smoothing: 0.2, reduction: mean };
                loss::dpo([x[0], x[1]], [x[2], x[3]], options)
            }),
        ),
        ("ipo", vec![&c, &r, &c0, &r0], Box::new(|x| loss::ipo([x[0], x[1]], [x[2], x[3]], 0.3, mean))),
        ("kto", vec![&c, &c0], Box::new(|x| loss::kto(x[0], x[1], &liked, &numbers(&[0.2]), kto(1.2, 1.0)))),
        ("kto_below", vec![&c, &c0], Box::new(|x| loss::kto(x[0], x[1], &liked, &numbers(&[-0.2]), kto(1.0, 0.9)))),
        ("orpo", vec![&c, &r], Box::new(|x| loss::orpo([x[0], x[1]], 0.4, mean))),
        (
            "ppo",
            vec![&new],
            Box::new(|x| loss::ppo(x[0], &old, &of_tokens, &mask, policy(0.2, 0.0, TokenMean::Tokens))),
        ),
        (
            "ppo_start",
            vec![&new],
            Box::new(|x| loss::ppo(x[0], &fixed(x[0]), &advantages, &mask, PolicyOptions::default())),
        ),
        (
            "grpo",
            vec![&new],
            Box::new(|x| {
                let options = policy(0.28, 0.04, TokenMean::Sequences);
                loss::grpo(x[0], &old, &reference, &advantages, &mask, options)
            }),
        ),
        (
            "grpo_length",
            vec![&new],
            Box::new(|x| {
                let options = policy(0.2, 0.5, TokenMean::Length(7));
                loss::grpo(x[0], &old, &reference, &advantages, &mask, options)
            }),
        ),
    ];
    let all: serde_json::Value = serde_json::from_str(include_str!("losses_of_preferences.json")).unwrap();
    let of = |v: &serde_json::Value| v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!(all.as_object().unwrap().len(), cases.len() + 1);
    for (name, inputs, f) in &cases {
        let loss = f(inputs).unwrap();
        let want = all[name]["loss"].as_f64().unwrap();
        assert!((loss.item().unwrap() - want).abs() < 1e-12, "{name}: {}, expected {want}", loss.item().unwrap());
        for (k, got) in grad(&[&loss], inputs).unwrap().iter().enumerate() {
            let (got, want) = (f64s(got.as_ref().unwrap()), of(&all[name]["gradients"][k]));
            let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
            assert!(got.len() == want.len() && worst < 1e-12, "{name}: gradient {k} is off by {worst}");
        }
    }
    let advantages = loss::group_advantages(&[1.0, 0.0, 2.0, 4.0, 4.0, 4.0], 3, true).unwrap();
    assert!(advantages.iter().zip(of(&all["advantages"])).all(|(got, want)| (got - want).abs() < 1e-12));
}

/// Where both policies are one, the loss of a preference is `ln 2`, the ratio 1 and the divergence 0, exactly.
#[test]
fn nothing_is_lost_at_the_start() {
    let [c, r] = [0, 1].map(|k| made(k, &[5]).to_dtype(DType::F32).unwrap());
    let options = DpoOptions { reduction: Reduction::Sum, ..Default::default() };
    let start = loss::dpo([&c, &r], [&fixed(&c), &fixed(&r)], options).unwrap();
    assert_eq!(start.item().unwrap(), f64::from(5.0 * std::f32::consts::LN_2));
    let new = made(0, &[3, 4]).to_dtype(DType::F32).unwrap();
    let zeros = Var::new(Tensor::zeros(&cpu(), [3, 1], DType::F32).unwrap());
    let mask = new.lt(0.0).unwrap();
    let options = PolicyOptions { kl: 1.0, ..Default::default() };
    let start = loss::grpo(&new, &fixed(&new), &fixed(&new), &zeros, &mask, options).unwrap();
    assert_eq!(start.item().unwrap(), 0.0);
}

/// Tokens that do not count change nothing, whatever their values are.
#[test]
fn hidden_tokens_are_not_read() {
    let of = |hidden: f64| {
        let values = [-1.0, hidden, -0.5, -2.0].map(|x| x as f32);
        let new = Var::leaf("new", Tensor::from_slice(&cpu(), [2, 2], &values).unwrap()).unwrap();
        let old = Var::new(Tensor::from_slice(&cpu(), [2, 2], &[-1.2f32, -1.0, -0.4, -2.5]).unwrap());
        let one = Var::new(Tensor::from_slice(&cpu(), [2, 1], &[1.0f32, -1.0]).unwrap());
        let mask = Var::new(Tensor::from_slice(&cpu(), [2, 2], &[1.0f32, 0.0, 1.0, 1.0]).unwrap());
        let loss = loss::grpo(&new, &old, &old, &one, &mask, PolicyOptions { kl: 0.1, ..Default::default() }).unwrap();
        let slope = grad(&[&loss], &[&new]).unwrap().remove(0).unwrap();
        (loss.item().unwrap(), f64s(&slope))
    };
    let (loss, slope) = of(-1.0);
    assert_eq!(slope[1], 0.0);
    assert_eq!((loss, slope), of(-9.0));
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let (states, weight) = (made(0, &[2, 3, 4]), made(1, &[6, 4]));
    let tokens = Var::new(Tensor::from_slice(&cpu(), [2, 3], &[-100i64, 1, 5, 0, -100, 3]).unwrap());
    let got = loss::logprobs(&states, &weight, &tokens).unwrap();
    let logits = states.matmul(&weight.t().unwrap()).unwrap();
    let none = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
    let want = logits.cross_entropy_with(&tokens, none).unwrap();
    assert_eq!(got.dims(), [2, 3]);
    for (got, want) in f64s(&got).iter().zip(f64s(&want)) {
        assert!((got + want).abs() < 1e-12 && *got <= 0.0, "{got}, {want}");
    }
}

#[test]
fn misuse_is_told() {
    let says = |result: Result<V>, words: &[&str]| {
        let error = result.unwrap_err().to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    };
    let (x, y, rows) = (made(0, &[5]), made(1, &[4]), made(2, &[2, 3]));
    let wrong = DpoOptions { beta: -1.0, ..Default::default() };
    says(loss::dpo([&x, &y], [&x, &x], DpoOptions::default()), &["dpo", "[5]", "[4]"]);
    says(loss::dpo([&x, &x], [&x, &x], wrong), &["beta", "positive"]);
    says(
        loss::dpo([&x, &x], [&x, &x], DpoOptions { label_smoothing: 0.6, ..Default::default() }),
        &["label_smoothing"],
    );
    says(loss::kto(&x, &x, &x, &y, KtoOptions::default()), &["kto", "one element", "[4]"]);
    says(loss::ppo(&rows, &rows, &x, &rows, PolicyOptions::default()), &["[N, 1]", "[2, 3]", "[5]"]);
    says(loss::ppo(&rows, &rows, &rows, &rows, PolicyOptions { kl: 0.1, ..Default::default() }), &["kl", "grpo"]);
    let long = PolicyOptions { mean: TokenMean::Length(0), ..Default::default() };
    says(loss::grpo(&rows, &rows, &rows, &rows, &rows, long), &["length", "at least 1"]);
    let told = |r: &[f64], group| loss::group_advantages(r, group, true).unwrap_err().to_string();
    assert!(told(&[1.0, 2.0, 3.0], 2).contains("divisor of the 3 rewards"));
    assert!(told(&[1.0, f64::NAN], 2).contains("finite"));
}
