//! Every optimizer of PyTorch's, against PyTorch.

use crate::common::{self, close, json, numbers, tensors};
use autograd::Leaf;
use numcore::DType;
use optim::*;
use runtime_cpu::Cpu;
use serde_json::Value;

/// Calls a check with the hyper-parameters that a case's `op` names.
macro_rules! by_name {
    ($case:ident, $check:ident($arg:expr)) => {
        match $case["op"].as_str().unwrap() {
            "sgd" => $check::<SgdConfig>($arg),
            "adam" => $check::<AdamConfig>($arg),
            "adamw" => $check::<AdamWConfig>($arg),
            "adamax" => $check::<AdamaxConfig>($arg),
            "nadam" => $check::<NAdamConfig>($arg),
            "radam" => $check::<RAdamConfig>($arg),
            "adagrad" => $check::<AdagradConfig>($arg),
            "rmsprop" => $check::<RmsPropConfig>($arg),
            "adadelta" => $check::<AdadeltaConfig>($arg),
            "adafactor" => $check::<AdafactorConfig>($arg),
            "muon" => $check::<MuonConfig>($arg),
            "schedule_free_adamw" => $check::<ScheduleFreeAdamWConfig>($arg),
            "schedule_free_sgd" => $check::<ScheduleFreeSgdConfig>($arg),
            "prodigy" => $check::<ProdigyConfig>($arg),
            #[cfg(feature = "linalg")]
            "soap" => $check::<SoapConfig>($arg),
            #[cfg(feature = "linalg")]
            "shampoo" => $check::<ShampooConfig>($arg),
            other => panic!("no optimizer is called {other}"),
        }
    };
}

/// `attrs` as hyper-parameters: names are PyTorch's.
fn config<C: Config>(attrs: &Value) -> C {
    let mut config = C::default();
    set(&mut config, attrs);
    config
}

fn set<C: Config>(config: &mut C, attrs: &Value) {
    for (name, value) in attrs.as_object().unwrap().iter().filter(|(n, _)| *n != "note") {
        let numbers = match value {
            Value::Bool(b) => vec![f64::from(u8::from(*b))],
            Value::Array(of) => of.iter().map(|x| x.as_f64().unwrap()).collect(),
            x => vec![x.as_f64().unwrap()],
        };
        config.set(name, &numbers).unwrap();
    }
}

/// Runs a case, on the parameters the optimizer takes.
fn check<C: UpdateRule>(case: &Value) {
    let cpu = Cpu::new();
    let golden = tensors("optim.safetensors", &cpu);
    let id = case["id"].as_str().unwrap();
    let n = case["params"].as_u64().unwrap() as usize;
    let all: Vec<_> =
        (0..n).map(|i| Leaf::new(&format!("p{i}"), golden[&format!("{id}/init{i}")].clone()).unwrap()).collect();
    let params: Vec<_> = all.iter().filter(|l| C::default().refuses(&l.spec()).is_none()).cloned().collect();
    let mut optimizer = FlatOptimizer::over(config::<C>(&case["attrs"]), &params).unwrap();
    let mut gradients = optimizer.alloc_gradients().unwrap();
    for step in 0..case["steps"].as_u64().unwrap() {
        gradients.zero();
        for (i, leaf) in all.iter().enumerate().filter(|(_, l)| params.iter().any(|p| p.id() == l.id())) {
            gradients.set(leaf, &golden[&format!("{id}/grad{step}.{i}")]).unwrap();
        }
        optimizer.step_from(&gradients).unwrap();
        if case["after"].as_array().unwrap().contains(&Value::from(step + 1)) {
            for (i, got) in numbers(&all).iter().enumerate() {
                let want = golden[&format!("{id}/after{}.{i}", step + 1)].to_f64s().unwrap();
                close(
                    got,
                    &want,
                    case["tol"].as_f64().unwrap(),
                    &format!("{id} parameter {i} after {} steps", step + 1),
                );
            }
        }
    }
}

#[test]
fn as_pytorch() {
    let cases = json("optim.json");
    let cases = cases["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        by_name!(case, check(case));
    }
}

/// The options that the first test leaves out: every hyper-parameter of every optimizer takes part in one of the two.
fn check_options<C: UpdateRule>(case: &Value) {
    check_trained::<C>(case, DType::F32, 1e-5);
}

fn check_authors<C: UpdateRule>(case: &Value) {
    check_trained::<C>(case, DType::F64, 1e-9);
}

fn check_trained<C: UpdateRule>(case: &Value, dtype: DType, tol: f64) {
    let cpu = Cpu::new();
    let shapes: Vec<Vec<usize>> = case["shapes"].as_array().unwrap().iter().map(sizes).collect();
    let params = common::leaves(&cpu, &shapes.iter().map(|s| &s[..]).collect::<Vec<_>>(), dtype);
    let mut optimizer = match case.get("other") {
        Some(other) => {
            let first = FlatOptimizer::in_groups(config::<C>(&case["attrs"])).group(&params[..2], |_| {}).unwrap();
            first.group(&params[2..], |config| set(config, other)).unwrap()
        }
        None => FlatOptimizer::over(config::<C>(&case["attrs"]), &params).unwrap(),
    };
    common::train(&mut optimizer, &params, 0..12);
    for group in 0..2 {
        for (name, want) in case.get("adapted").into_iter().flat_map(|adapted| adapted.as_object().unwrap()) {
            let mut config = optimizer.config(group).clone();
            let setting = config.settings().into_iter().find(|own| own.name == name).unwrap();
            close(&setting.value.numbers(), &[want.as_f64().unwrap()], tol, &format!("{} {name}", case["attrs"]));
        }
    }
    let check = |of: &str| {
        for (i, got) in numbers(&params).iter().enumerate() {
            let want: Vec<f64> = case[of][i].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
            close(got, &want, tol, &format!("{} {} parameter {i} {of}", case["op"], case["attrs"]));
        }
    };
    check("after");
    if case.get("average").is_some() {
        let averages = EvaluationWeights::of(&optimizer).unwrap();
        let own = averages.exchange().unwrap();
        check("average");
        own.exchange().unwrap();
        check("after");
    }
}

fn sizes(shape: &Value) -> Vec<usize> {
    shape.as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize).collect()
}

#[test]
fn options_as_pytorch() {
    let text = include_str!("../data/options.json");
    let cases: Value = serde_json::from_str(text).unwrap();
    for case in cases["cases"].as_array().unwrap() {
        by_name!(case, check_options(case));
    }
}

#[test]
fn as_their_authors_code() {
    let cases: Value = serde_json::from_str(include_str!("../data/authors.json")).unwrap();
    for case in cases["cases"].as_array().unwrap() {
        by_name!(case, check_authors(case));
    }
}
