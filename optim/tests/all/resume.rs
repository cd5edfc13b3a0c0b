//! Saving and loading: exact, strict, all or nothing.

use std::sync::Arc;

use crate::common::{Params, bytes, copies, leaves, numbers, tensor, train};
use autograd::Leaf;
use numcore::{DType, NullRuntime, Runtime, Tensor};
use optim::*;
use runtime_cpu::Cpu;

/// One parameter has enough elements for the 8-bit state of rules that have it.
const SHAPES: [&[usize]; 3] = [&[5, 3], &[65, 64], &[2, 2]];

/// Any optimizer over all parameters, with other hyper-parameters in every second group.
fn build<C: UpdateRule, R: Runtime>(config: C, params: &[Arc<Leaf<R>>]) -> FlatOptimizer<R, C> {
    let split = FlatOptimizer::in_groups(config).group(&params[..2], |_| {}).unwrap();
    let slower = |c: &mut C| c.set_lr(c.lr() * 0.5);
    split.group(&params[2..], slower).unwrap().scheduled(Cosine { t_max: 10, eta_min: 0.0 })
}

/// Trains on, and from the saved state in new parameters: the same bits. `order`: whether the model is loaded first.
fn resumes<C: UpdateRule>(config: C, dtype: DType, model_first: bool) {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, dtype);
    let mut optimizer = build(config.clone(), &params);
    train(&mut optimizer, &params, 0..3);
    let model: Vec<Tensor<Cpu>> = params.iter().map(|l| l.value().unwrap().copy().unwrap()).collect();
    let state = copies(optimizer.state_dict().unwrap());
    train(&mut optimizer, &params, 3..6);

    let again = leaves(&cpu, &SHAPES, dtype);
    let mut other = config.clone();
    other.set_lr(9.0);
    let mut resumed = build(other, &again);
    let load_model = || again.iter().zip(&model).for_each(|(l, v)| l.set(v.clone()).unwrap());
    if model_first {
        load_model();
    }
    resumed.load_state_dict(&state).unwrap();
    if !model_first {
        load_model();
    }
    train(&mut resumed, &again, 3..6);
    let raw = |p: &Params<Cpu>| p.iter().map(|l| l.value().unwrap().to_bytes().unwrap()).collect::<Vec<_>>();
    assert_eq!(raw(&params), raw(&again), "{} {dtype}", C::NAME);
    assert_eq!(bytes(&optimizer.state_dict().unwrap()), bytes(&resumed.state_dict().unwrap()), "{} {dtype}", C::NAME);
}

#[test]
fn every_optimizer_resumes_bit_for_bit() {
    for dtype in [DType::F32, DType::BF16] {
        for first in [false, true] {
            resumes(SgdConfig { momentum: 0.9, ..Default::default() }, dtype, first);
            resumes(AdamConfig { amsgrad: true, ..Default::default() }, dtype, first);
            resumes(AdamWConfig::default(), dtype, first);
            resumes(AdamaxConfig::default(), dtype, first);
            resumes(NAdamConfig::default(), dtype, first);
            resumes(RAdamConfig::default(), dtype, first);
            resumes(AdagradConfig { initial_accumulator_value: 0.1, ..Default::default() }, dtype, first);
            resumes(RmsPropConfig { momentum: 0.9, centered: true, ..Default::default() }, dtype, first);
            resumes(AdadeltaConfig::default(), dtype, first);
            resumes(LionConfig::default(), dtype, first);
            resumes(AdanConfig::default(), dtype, first);
            resumes(ScheduleFreeAdamWConfig { warmup_steps: 4, ..Default::default() }, dtype, first);
            resumes(ScheduleFreeSgdConfig::default(), dtype, first);
            resumes(ProdigyConfig { d0: 0.01, weight_decay: 0.1, ..Default::default() }, dtype, first);
            resumes(AdamW8bitConfig::default(), dtype, first);
            resumes(Bf16State(AdamWConfig { amsgrad: true, ..Default::default() }), dtype, first);
            resumes(LambConfig::default(), dtype, first);
            resumes(AdafactorConfig::default(), dtype, first);
            resumes(MuonConfig::default(), dtype, first);
            #[cfg(feature = "linalg")]
            resumes(SoapConfig { precondition_frequency: 2, ..Default::default() }, dtype, first);
            #[cfg(feature = "linalg")]
            resumes(ShampooConfig { momentum: 0.9, precondition_frequency: 2, ..Default::default() }, dtype, first);
        }
    }
}

#[test]
fn names_are_pytorchs() {
    let cpu = Cpu::new();
    let params = [Leaf::new("fc.weight", tensor(&cpu, &[2, 2], DType::BF16, 0)).unwrap()];
    let adamw = AdamW::over(AdamWConfig::default(), &params).unwrap();
    let state = adamw.state_dict().unwrap();
    let names: Vec<&str> = state.iter().map(|(n, _)| n.as_str()).collect();
    let of_param = ["exp_avg.fc.weight", "exp_avg_sq.fc.weight", "master.fc.weight", "step.fc.weight"];
    let of_group = ["lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"].map(|n| format!("group.0.{n}"));
    let want: Vec<&str> = of_param.into_iter().chain(of_group.iter().map(String::as_str)).chain(["steps"]).collect();
    assert_eq!(names, want);
}

#[test]
fn hyper_parameters_are_resumed() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, DType::F32);
    let config = AdafactorConfig { eps1: Some(1e-5), d: 2.0, maximize: true, ..Default::default() };
    let saved = FlatOptimizer::over(config.clone(), &params).unwrap().state_dict().unwrap();
    let mut other = FlatOptimizer::over(AdafactorConfig::default(), leaves(&cpu, &SHAPES, DType::F32)).unwrap();
    other.load_state_dict(&saved).unwrap();
    assert_eq!(*other.config(0), config);

    let config = MuonConfig { adjust_lr: AdjustLr::SpectralUnclamped, ns_steps: 3, ..Default::default() };
    let saved = FlatOptimizer::over(config.clone(), &params).unwrap().state_dict().unwrap();
    let mut other = FlatOptimizer::over(MuonConfig::default(), leaves(&cpu, &SHAPES, DType::F32)).unwrap();
    other.load_state_dict(&saved).unwrap();
    assert_eq!(*other.config(0), config);
}

#[test]
fn a_state_that_does_not_fit_is_refused_whole() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, DType::F32);
    let mut adam = build(AdamConfig::default(), &params);
    train(&mut adam, &params, 0..2);
    let good = copies(adam.state_dict().unwrap());
    let mut bad = good.clone();
    bad.retain(|(n, _)| n != "exp_avg.p1");
    bad.push(("exp_avg.p9".into(), tensor(&cpu, &[2], DType::F32, 0)));
    let mut replace = |name: &str, t: Tensor<Cpu>| bad.iter_mut().find(|(n, _)| n == name).unwrap().1 = t;
    replace("exp_avg_sq.p0", tensor(&cpu, &[3, 5], DType::F32, 0));
    replace("exp_avg.p2", tensor(&cpu, &[2, 2], DType::F64, 0));
    replace("step.p0", Tensor::from_slice(&cpu, [], &[-1i64]).unwrap());
    replace("group.1.betas", Tensor::from_slice(&cpu, [2], &[0.9, 1.5]).unwrap());
    replace("group.0.amsgrad", Tensor::from_slice(&cpu, [], &[1.0f64]).unwrap());
    replace("group.0.lr", Tensor::from_slice(&cpu, [2], &[1.0f64, 2.0]).unwrap());
    train(&mut adam, &params, 2..4);
    let (before, state) = (numbers(&params), bytes(&adam.state_dict().unwrap()));

    let error = adam.load_state_dict(&bad).unwrap_err().to_string();
    let all = [
        "`exp_avg.p1` is missing",
        "`exp_avg.p9` is unexpected",
        "`exp_avg_sq.p0` is f32 [3, 5], not f32 [5, 3]",
        "`exp_avg.p2` is f64 [2, 2], not f32 [2, 2]",
        "`step.p0` is no count",
        "`betas` must be in [0, 1)",
        "max_exp_avg_sq",
        "`group.0.lr` cannot be [1.0, 2.0]",
    ];
    all.iter().for_each(|part| assert!(error.contains(part), "{part} is not in: {error}"));
    assert_eq!((numbers(&params), bytes(&adam.state_dict().unwrap())), (before, state));

    adam.load_state_dict(&good).unwrap();
    assert_eq!(bytes(&adam.state_dict().unwrap()), bytes(&good));
}

#[test]
fn combined_states_keep_apart() {
    let cpu = Cpu::new();
    let make = |params: &Params<Cpu>| {
        let muon = Muon::over(MuonConfig::default(), &params[..2]).unwrap();
        let adam = AdamW::over(AdamWConfig::default(), &params[2..]).unwrap();
        Combined::new(vec![Box::new(muon), Box::new(adam)]).unwrap()
    };
    let (a, b) = (leaves(&cpu, &SHAPES, DType::F32), leaves(&cpu, &SHAPES, DType::F32));
    let mut first = make(&a);
    train(&mut first, &a, 0..2);
    let state = copies(first.state_dict().unwrap());
    assert!(state.iter().any(|(n, _)| n == "0.momentum_buffer.p1") && state.iter().any(|(n, _)| n == "1.exp_avg.p2"));
    let mut second = make(&b);
    let mut bad = state.clone();
    bad.retain(|(n, _)| n != "1.exp_avg.p2");
    bad.push(("2.steps".into(), state[0].1.clone()));
    let error = second.load_state_dict(&bad).unwrap_err().to_string();
    assert!(error.contains("`2.steps` is unexpected") && error.contains("`exp_avg.p2` is missing"), "{error}");
    b.iter().zip(&a).for_each(|(b, a)| b.set(a.value().unwrap().copy().unwrap()).unwrap());
    second.load_state_dict(&state).unwrap();
    train(&mut first, &a, 2..4);
    train(&mut second, &b, 2..4);
    assert_eq!(numbers(&a), numbers(&b));
}

#[test]
fn goes_through_a_file() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, DType::F16);
    let mut adam = build(AdamWConfig::default(), &params);
    train(&mut adam, &params, 0..2);
    let path = std::env::temp_dir().join(format!("weftgrad-optim-{}.safetensors", std::process::id()));
    numcore::safetensors::save(&path, &adam.state_dict().unwrap(), &Default::default()).unwrap();
    let read = numcore::safetensors::load(&path, &cpu).unwrap();
    std::fs::remove_file(&path).unwrap();
    let before = bytes(&adam.state_dict().unwrap());
    train(&mut adam, &params, 2..3);
    adam.load_state_dict(&read).unwrap();
    assert_eq!(bytes(&adam.state_dict().unwrap()), before);
}

#[test]
fn nothing_to_save_is_nothing() {
    let mut empty = Sgd::<NullRuntime>::in_groups(SgdConfig::default());
    assert!(empty.state_dict().unwrap().is_empty());
    empty.load_state_dict(&[]).unwrap();
    empty.step_from(&empty.alloc_gradients().unwrap()).unwrap();
}
