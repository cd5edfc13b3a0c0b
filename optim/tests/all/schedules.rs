//! Schedules against PyTorch's, and what must hold of those PyTorch does not have.

use crate::common;
use optim::*;
use serde_json::Value;

fn schedule(op: &str, attrs: &Value) -> Box<dyn LrSchedule> {
    let f = |name: &str| attrs[name].as_f64().unwrap();
    let n = |name: &str| attrs[name].as_u64().unwrap();
    match op {
        "step" => Box::new(StepLr { size: n("step_size"), gamma: f("gamma") }),
        "multistep" => {
            let milestones = attrs["milestones"].as_array().unwrap().iter().map(|m| m.as_u64().unwrap()).collect();
            Box::new(MultiStepLr { milestones, gamma: f("gamma") })
        }
        "exponential" => Box::new(ExponentialLr { gamma: f("gamma") }),
        "cosine" => Box::new(Cosine { t_max: n("t_max"), eta_min: f("eta_min") }),
        "cosine_restarts" => Box::new(CosineRestarts { t_0: n("t_0"), t_mult: n("t_mult"), eta_min: f("eta_min") }),
        "linear" => Box::new(LinearLr { start: f("start"), end: f("end"), total: n("total") }),
        "polynomial" => Box::new(PolynomialLr { total: n("total"), power: f("power") }),
        "onecycle" => {
            let [div, final_div, pct_start] = [f("div"), f("final_div"), f("pct_start")];
            Box::new(OneCycle { max_lr: f("max_lr"), total: n("total"), pct_start, div, final_div })
        }
        "cyclic_triangular" => Box::new(CyclicTriangular { low: f("base"), high: f("max"), up: n("step_up"), down: 0 }),
        "warmup_then_cosine" => {
            Box::new(Warmup { steps: n("warmup"), start: 0.01 }.then(Cosine { t_max: n("t_max"), eta_min: 0.0 }))
        }
        other => panic!("no schedule is called {other}"),
    }
}

#[test]
fn as_pytorch() {
    let cases = common::json("lr.json");
    let cases = cases.as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let op = case["op"].as_str().unwrap();
        let schedule = schedule(op, &case["attrs"]);
        for (step, want) in case["lr"].as_array().unwrap().iter().enumerate() {
            let (got, want) = (schedule.lr(case["base_lr"].as_f64().unwrap(), step as u64), want.as_f64().unwrap());
            assert!((got - want).abs() <= 1e-12 * want.abs(), "{op} at {step}: {got} instead of {want}");
        }
    }
}

/// The largest change between consecutive steps.
fn jump(s: &dyn LrSchedule, steps: u64) -> f64 {
    (1..steps).map(|t| (s.lr(1.0, t) - s.lr(1.0, t - 1)).abs()).fold(0.0, f64::max)
}

#[test]
fn warmup_cosine_rises_falls_and_stays() {
    let s = WarmupCosine { warmup: 9, total: 109, end: 0.1 };
    assert_eq!((s.factor(0), s.factor(9)), (0.1, 1.0));
    assert!((s.factor(59) - 0.55).abs() < 1e-12, "half way down is half way between");
    assert_eq!((s.factor(109), s.factor(1_000_000)), (0.1, 0.1));
    assert!(jump(&s, 200) < 0.1 + 1e-12);
}

#[test]
fn wsd_has_three_phases() {
    let linear = Wsd { warmup: 4, stable: 10, decay: 5, end: 0.0, cooldown: Cooldown::Linear };
    let rates: Vec<f64> = (0..20).map(|t| linear.lr(2.0, t)).collect();
    let want = |t: usize| match t {
        0..4 => 2.0 * (t as f64 + 1.0) / 5.0,
        4..14 => 2.0,
        14..19 => 2.0 * (1.0 - (t - 14) as f64 / 5.0),
        _ => 0.0,
    };
    (0..20).for_each(|t| assert!((rates[t] - want(t)).abs() < 1e-12, "{t}: {} instead of {}", rates[t], want(t)));
    let sqrt = Wsd { cooldown: Cooldown::OneMinusSqrt, ..linear };
    assert!((sqrt.lr(1.0, 15) - (1.0 - 0.2f64.sqrt())).abs() < 1e-12);
    assert_eq!((sqrt.lr(1.0, 14), sqrt.lr(1.0, 19)), (1.0, 0.0));
}

#[test]
fn inverse_square_root_meets_its_warm_up() {
    let rates: Vec<f64> = [0, 1, 3, 15, 63].map(|t| InverseSqrt { warmup: 4 }.lr(2.0, t)).to_vec();
    assert_eq!(rates, [0.5, 1.0, 2.0, 1.0, 0.5]);
}

#[test]
fn onecycle_peaks_and_ends() {
    let s = OneCycle::new(1.0, 100);
    let peak = (0..100).max_by(|&a, &b| s.lr(0.0, a).total_cmp(&s.lr(0.0, b))).unwrap();
    assert_eq!((peak, s.lr(0.0, 29)), (29, 1.0));
    assert!((s.lr(0.0, 99) - 4e-6).abs() < 1e-18 && s.lr(0.0, 500) == s.lr(0.0, 99));
}

#[test]
fn degenerate_lengths_are_no_trap() {
    let all: [&dyn LrSchedule; 10] = [
        &InverseSqrt { warmup: 0 },
        &StepLr { size: 0, gamma: 0.5 },
        &Cosine { t_max: 0, eta_min: 0.0 },
        &CosineRestarts { t_0: 0, t_mult: 0, eta_min: 0.0 },
        &CosineRestarts { t_0: 1, t_mult: u64::MAX, eta_min: 0.0 },
        &LinearLr { start: 0.0, end: 1.0, total: 0 },
        &PolynomialLr { total: 0, power: 2.0 },
        &OneCycle::new(1.0, 1),
        &WarmupCosine { warmup: 5, total: 3, end: 0.0 },
        &Wsd { warmup: 0, stable: 0, decay: 0, end: 0.5, cooldown: Cooldown::Linear },
    ];
    for (i, s) in all.iter().enumerate() {
        (0..10).for_each(|t| assert!(s.lr(0.1, t).is_finite(), "schedule {i} at {t}"));
    }
    let triangle = CyclicTriangular { low: 0.0, high: 1.0, up: 0, down: 3 };
    assert_eq!((triangle.lr(0.0, 0), triangle.lr(0.0, 1), triangle.lr(0.0, 4)), (0.0, 1.0, 0.0));
}

#[test]
fn a_function_is_a_schedule() {
    let halves = |base: f64, step: u64| base / (1 + step) as f64;
    assert_eq!(halves.lr(0.3, 1), 0.15);
    let warm = Warmup { steps: 2, start: 0.5 }.then(halves);
    assert_eq!([0, 1, 2, 3].map(|t| warm.lr(1.0, t)), [0.5, 0.75, 1.0, 0.5]);
}

/// Weights stay what they are.
#[test]
fn a_rate_that_is_no_number_is_an_error() {
    use autograd::Leaf;
    use numcore::{DType, Tensor};
    use optim::{Optimizer, Sgd, SgdConfig};
    let rt = runtime_cpu::Cpu::with_threads(1);
    let leaf = Leaf::new("w", Tensor::ones(&rt, [2], DType::F32).unwrap()).unwrap();
    let broken = |base: f64, step: u64| if step == 1 { f64::NAN } else { base };
    let mut sgd =
        Sgd::in_groups(SgdConfig::default()).group(std::slice::from_ref(&leaf), |_| {}).unwrap().scheduled(broken);
    let ones = || {
        let x = leaf.var();
        numcore::ops::ReduceOps::sum_all(&x).unwrap().backward().unwrap()
    };
    sgd.step_with(&ones()).unwrap();
    let before = leaf.value().unwrap().to_vec::<f32>().unwrap();
    let error = sgd.step_with(&ones()).unwrap_err().to_string();
    assert!(error.contains("learning rate is NaN, and must be finite: look at the schedule of group 0"), "{error}");
    assert_eq!(leaf.value().unwrap().to_vec::<f32>().unwrap(), before);
}

/// Nor is a step of several optimizers taken by those before the one that has no rate.
#[test]
fn a_rate_that_is_no_number_stops_optimizers_that_step_together() {
    use autograd::Leaf;
    use numcore::{DType, Tensor};
    use optim::{Combined, Optimizer, Sgd, SgdConfig};
    let rt = runtime_cpu::Cpu::with_threads(1);
    let leaf = |name: &str| Leaf::new(name, Tensor::ones(&rt, [2], DType::F32).unwrap()).unwrap();
    let leaves = [leaf("v"), leaf("w")];
    let sgd = |k: usize| Sgd::over(SgdConfig::default(), std::slice::from_ref(&leaves[k])).unwrap();
    let broken = |base: f64, step: u64| if step == 1 { f64::NAN } else { base };
    let both: Vec<Box<dyn Optimizer<_>>> = vec![Box::new(sgd(0)), Box::new(sgd(1).scheduled(broken))];
    let mut both = Combined::new(both).unwrap();
    let ones = || {
        let sum = numcore::ops::PointwiseOps::add(&leaves[0].var(), &leaves[1].var()).unwrap();
        numcore::ops::ReduceOps::sum_all(&sum).unwrap().backward().unwrap()
    };
    both.step_with(&ones()).unwrap();
    let values = || leaves.each_ref().map(|leaf| leaf.value().unwrap().to_vec::<f32>().unwrap());
    let (before, steps) = (values(), both.steps());
    let error = both.step_with(&ones()).unwrap_err().to_string();
    assert_eq!((values(), both.steps()), (before, steps));
    assert!(error.contains("learning rate is NaN, and must be finite: look at the schedule of group 1"), "{error}");
}
