//! Initialisers: their moments, bounds and orthogonality; reproducibility.

use crate::common::cpu;
use nn::*;
use numcore::{DType, MemoryCategory, NullRuntime, Runtime};

const SHAPE: [usize; 4] = [64, 32, 3, 3];
const FAN_IN: f64 = 288.0;
const FAN_OUT: f64 = 576.0;

fn draw(how: Initializer) -> Vec<f64> {
    Init::new(&cpu(), 3).tensor(SHAPE, how).unwrap().to_f64s().unwrap()
}

/// Checks mean and deviation within five standard errors, and the bound of a uniform.
fn check(how: Initializer, mean: f64, std: f64, bound: f64) {
    let values = draw(how);
    let n = values.len() as f64;
    let m = values.iter().sum::<f64>() / n;
    let s = (values.iter().map(|x| (x - m).powi(2)).sum::<f64>() / n).sqrt();
    assert!((m - mean).abs() < 5.0 * std / n.sqrt(), "{how:?}: mean {m}");
    assert!((s / std - 1.0).abs() < 5.0 / n.sqrt(), "{how:?}: deviation {s}, expected {std}");
    let largest = values.iter().fold(0f64, |a, x| a.max((x - mean).abs()));
    assert!(largest <= bound * (1.0 + 1e-6) && largest > bound.min(3.0 * std) * 0.98, "{how:?}: reaches {largest}");
}

#[test]
fn formulas_of_variance() {
    let uniform = |how, std: f64| check(how, 0.0, std, std * 3f64.sqrt());
    let normal = |how, mean, std| check(how, mean, std, f64::INFINITY);
    uniform(Initializer::Uniform { low: -0.5, high: 0.5 }, 1.0 / 12f64.sqrt());
    normal(Initializer::Normal { mean: 2.0, std: 0.3 }, 2.0, 0.3);
    uniform(Initializer::XavierUniform { gain: 2.0 }, 2.0 * (2.0 / (FAN_IN + FAN_OUT)).sqrt());
    normal(Initializer::XavierNormal { gain: 1.0 }, 0.0, (2.0 / (FAN_IN + FAN_OUT)).sqrt());
    uniform(Initializer::KaimingUniform { fan: Fan::In, gain: Nonlinearity::Relu.gain() }, (2.0 / FAN_IN).sqrt());
    normal(Initializer::KaimingNormal { fan: Fan::Out, gain: 1.0 }, 0.0, (1.0 / FAN_OUT).sqrt());
    // PyTorch's default of linear layers: Kaiming-uniform for a leaky rectifier with slope √5.
    let slope = Nonlinearity::LeakyRelu(5f64.sqrt()).gain();
    uniform(Initializer::KaimingUniform { fan: Fan::In, gain: slope }, (1.0 / (3.0 * FAN_IN)).sqrt());
    uniform(Initializer::by_fan(288), (1.0 / (3.0 * FAN_IN)).sqrt());
}

/// The variance of a standard normal truncated to ±2 is 1 − 2·2φ(2)/(2Φ(2) − 1) = 0.7737.
#[test]
fn truncated_normal() {
    check(Initializer::TruncNormal { mean: 1.0, std: 0.5, low: 0.0, high: 2.0 }, 1.0, 0.5 * 0.773_741_3f64.sqrt(), 1.0);
    let refused = |mean, std, low, high| {
        let how = Initializer::TruncNormal { mean, std, low, high };
        Init::new(&cpu(), 0).tensor([4], how).unwrap_err().to_string()
    };
    assert!(refused(0.0, 1.0, 9.0, 10.0).contains("use a uniform"));
    assert!(refused(0.0, 0.0, -1.0, 1.0).starts_with("trunc_normal"));
    assert!(refused(0.0, 1.0, f64::NAN, 1.0).starts_with("trunc_normal"));
}

#[test]
fn constants() {
    assert!(draw(Initializer::Zeros).iter().all(|&x| x == 0.0));
    assert!(draw(Initializer::Ones).iter().all(|&x| x == 1.0));
    assert!(draw(Initializer::Constant(0.25)).iter().all(|&x| x == 0.25));
    assert_eq!(Nonlinearity::Tanh.gain(), 5.0 / 3.0);
}

/// `W Wᵀ = gain²` (or `Wᵀ W` where there are more rows than columns).
#[test]
fn orthogonal_rows_or_columns() {
    let init = Init::new(&cpu(), 5).dtype(DType::F64);
    for [rows, columns] in [[20, 50], [50, 20], [30, 30], [1, 7]] {
        let w = init.tensor([rows, columns], Initializer::Orthogonal { gain: 2.0 }).unwrap().to_f64s().unwrap();
        let (count, len) = (rows.min(columns), rows.max(columns));
        let at = |i: usize, k: usize| if rows <= columns { w[i * columns + k] } else { w[k * columns + i] };
        for i in 0..count {
            for j in 0..count {
                let dot: f64 = (0..len).map(|k| at(i, k) * at(j, k)).sum();
                let want = if i == j { 4.0 } else { 0.0 };
                assert!((dot - want).abs() < 1e-12, "[{rows}, {columns}]: {i} · {j} = {dot}");
            }
        }
    }
}

#[test]
fn fans_need_two_axes() {
    let error = Init::new(&cpu(), 0).param([4], Initializer::XavierUniform { gain: 1.0 }).unwrap_err().to_string();
    assert!(error.contains("only weights with two axes or more have a fan"), "{error}");
    let empty = Init::new(&cpu(), 0).tensor([0, 4], Initializer::KaimingUniform { fan: Fan::Out, gain: 1.0 }).unwrap();
    assert_eq!(empty.dims(), [0, 4]);
}

#[test]
fn the_same_seed_makes_the_same_model() {
    let state = |seed| {
        let init = Init::new(&cpu(), seed);
        let model =
            Gpt::new(&init, GptConfig { vocab: 11, context: 8, layers: 2, heads: 2, width: 8, ..Default::default() });
        let state = model.unwrap().state_dict().unwrap();
        state.into_iter().map(|(_, t)| t.to_f64s().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(state(7), state(7));
    assert_ne!(state(7), state(8));
}

#[test]
fn parameters_differ_from_one_another() {
    let init = Init::new(&cpu(), 0);
    let (a, b) = (Linear::new(&init, 4, 4).unwrap(), Linear::new(&init, 4, 4).unwrap());
    assert_ne!(a.weight.value().unwrap().to_f64s().unwrap(), b.weight.value().unwrap().to_f64s().unwrap());
}

#[test]
fn the_caller_decides_over_the_model() {
    let init = Init::new(&cpu(), 0).weights(Initializer::Constant(0.5)).biases(Initializer::Ones);
    let model =
        Gpt::new(&init, GptConfig { vocab: 3, context: 2, layers: 1, heads: 1, width: 2, ..Default::default() })
            .unwrap();
    for (name, p) in model.named_parameters() {
        let want = match name.rsplit_once('.').unwrap() {
            (norm, "bias") if norm.contains("ln") => 0.0,
            (_, "bias") => 1.0,
            (norm, _) if norm.contains("ln") => 1.0,
            _ => 0.5,
        };
        assert!(p.value().unwrap().to_f64s().unwrap().iter().all(|&x| x == want), "{name}");
    }
}

#[test]
fn parameters_are_booked_as_such_and_have_the_dtype() {
    let rt = cpu();
    let layer = Linear::new(&Init::new(&rt, 0).dtype(DType::F16), 100, 100).unwrap();
    assert_eq!(layer.weight.dtype(), DType::F16);
    assert!(rt.memory().of(MemoryCategory::Parameters).live >= 2 * 100 * 101);
}

/// Shapes flow without a device: a model can be inspected without memory for its parameters.
#[test]
fn a_model_without_memory() {
    let model = Gpt::new(&Init::new(&NullRuntime::new(), 0), GptConfig::default()).unwrap();
    assert_eq!(model.num_parameters().total, 10_942_464);
}

#[test]
fn a_copy_of_what_is_not_drawn_yet_draws_one_table() {
    let rt = cpu();
    let one = Init::new(&rt, 3).lazily().weight([64, 64], Initializer::by_fan(64)).unwrap();
    let copy = one.duplicate().unwrap();
    let most = |parameter: &Param<_>| {
        rt.reset_peak();
        let before = rt.memory().of(MemoryCategory::Parameters).live;
        let value = parameter.value().unwrap();
        (rt.memory().of(MemoryCategory::Parameters).peak - before, value.to_f64s().unwrap())
    };
    assert_eq!(most(&copy), most(&one));
}
