//! The machinery: launches, memory, groups, parameters without gradients, shared values, master copies.
#![allow(clippy::needless_range_loop)]

use std::sync::Arc;

use crate::common::{self, fill, leaves, numbers, tensor, train};
use autograd::{Gradients, Leaf};
use numcore::{DType, ErrorKind, MemoryCategory, NullRuntime, Runtime, Tensor, ops::PointwiseOps};
use optim::*;
use runtime_cpu::Cpu;

const SHAPES: [&[usize]; 4] = [&[5, 3], &[70], &[], &[2, 3, 4]];

#[test]
fn one_launch_per_group_and_no_memory() {
    let rt = NullRuntime::new();
    let params = leaves(&rt, &SHAPES, DType::F32);
    let mut adamw = AdamW::in_groups(AdamWConfig::default())
        .group(&params[..2], |_| {})
        .unwrap()
        .group(&params[2..], |c| c.weight_decay = 0.0)
        .unwrap()
        .scheduled(Cosine { t_max: 100, eta_min: 0.0 });
    let mut gradients = adamw.alloc_gradients().unwrap();
    fill(&mut gradients, &params, 0);
    for _ in 0..5 {
        let (launches, allocations) = (rt.launches(), rt.memory().allocations);
        adamw.step_from(&gradients).unwrap();
        assert_eq!(rt.launches() - launches, 2);
        assert_eq!(rt.memory().allocations, allocations);
    }
    let total = clip_grad_norm(&mut gradients, 1.0, NormOrder::L2).unwrap();
    let launches = rt.launches();
    adamw.step_from(&gradients).unwrap();
    assert_eq!(rt.launches() - launches, 2, "clipping is part of the update");
    assert!(total.dims().is_empty());
}

#[test]
fn memory_is_booked_where_it_belongs() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &[&[100, 10], &[1000]], DType::F32);
    let optimizer = Adam::over(AdamConfig::default(), &params).unwrap();
    let gradients = optimizer.alloc_gradients().unwrap();
    let live = |u: MemoryCategory| cpu.memory().of(u).live;
    let one = live(MemoryCategory::Parameters);
    assert!(one >= 8000 && live(MemoryCategory::Gradients) == one && live(MemoryCategory::Optimizer) == 2 * one);
    let before = live(MemoryCategory::Parameters);
    let product = params[0].value().unwrap().square().unwrap();
    assert_eq!(live(MemoryCategory::Parameters), before, "what is computed from a parameter is no parameter");
    drop((product, gradients));
}

#[test]
fn groups_follow_their_own_numbers() {
    let cpu = Cpu::new();
    let together = leaves(&cpu, &SHAPES, DType::F32);
    let apart = leaves(&cpu, &SHAPES, DType::F32);
    let config = AdamWConfig { lr: 0.02, ..Default::default() };
    let mut one = AdamW::in_groups(config.clone())
        .group(&together[..2], |c| c.weight_decay = 0.3)
        .unwrap()
        .group(&together[2..], |c| c.lr *= 0.5)
        .unwrap();
    train(&mut one, &together, 0..4);
    assert_eq!(one.lrs(), [0.02, 0.01]);
    for (i, leaf) in apart.iter().enumerate() {
        let mut config = config.clone();
        if i < 2 {
            config.weight_decay = 0.3
        } else {
            config.lr *= 0.5
        }
        let mut alone = AdamW::over(config, [leaf]).unwrap();
        let mut gradients = alone.alloc_gradients().unwrap();
        for k in 0..4 {
            fill(&mut gradients, &[], k);
            gradients.set(leaf, &tensor(&cpu, &leaf.spec().shape, DType::F32, 1000 * k + i)).unwrap();
            alone.step_from(&gradients).unwrap();
        }
    }
    assert_eq!(numbers(&together), numbers(&apart), "neighbours in a buffer do not matter");
}

#[test]
fn parameters_without_gradient_are_left_alone() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, DType::F32);
    let mut adam = AdamW::over(AdamWConfig { lr: 0.1, ..Default::default() }, &params).unwrap();
    let mut gradients = adam.alloc_gradients().unwrap();
    fill(&mut gradients, &params[1..2], 0);
    gradients.set(&params[3], &tensor(&cpu, SHAPES[3], DType::F32, 9)).unwrap();
    let (before, versions) = (numbers(&params), versions(&params));
    adam.step_from(&gradients).unwrap();
    let after = numbers(&params);
    assert!(before[0] == after[0] && before[1] != after[1] && before[2] == after[2] && before[3] != after[3]);
    assert_eq!(common_versions(&params, &versions), [false, true, false, true]);
    let missing = gradients.require_all().unwrap_err();
    assert!(matches!(missing.kind(), ErrorKind::MissingGradient { names } if *names == ["p0", "p2"]));

    // Each has its own count of updates: its first one is corrected as a first one, whenever it comes.
    let mut all = adam.alloc_gradients().unwrap();
    fill(&mut all, &params, 7);
    adam.step_from(&all).unwrap();
    let alone = leaves(&cpu, &SHAPES[..2], DType::F32);
    let mut apart = alone.iter().map(|l| AdamW::over(AdamWConfig { lr: 0.1, ..Default::default() }, [l]).unwrap());
    let (mut late, mut both) = (apart.next().unwrap(), apart.next().unwrap());
    let step = |optimizer: &mut AdamW<Cpu>, i: usize, k: usize| {
        let mut gradients = optimizer.alloc_gradients().unwrap();
        gradients.set(&alone[i], &tensor(&cpu, SHAPES[i], DType::F32, k)).unwrap();
        optimizer.step_from(&gradients).unwrap();
    };
    step(&mut late, 0, 7000);
    step(&mut both, 1, 0);
    step(&mut both, 1, 7001);
    assert_eq!(numbers(&params)[..2], numbers(&alone)[..]);
}

fn versions<R: Runtime>(params: &[Arc<Leaf<R>>]) -> Vec<u64> {
    params.iter().map(|l| l.version()).collect()
}

fn common_versions<R: Runtime>(params: &[Arc<Leaf<R>>], before: &[u64]) -> Vec<bool> {
    versions(params).iter().zip(before).map(|(now, then)| now > then).collect()
}

#[test]
fn a_shared_value_stops_the_step_and_changes_nothing() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, DType::F32);
    let mut sgd = Sgd::in_groups(SgdConfig { momentum: 0.9, ..Default::default() })
        .group(&params[..2], |_| {})
        .unwrap()
        .group(&params[2..3], |_| {})
        .unwrap();
    train(&mut sgd, &params[..3], 0..2);
    let mut gradients = sgd.alloc_gradients().unwrap();
    fill(&mut gradients, &params[..3], 2);
    let (before, old) = (numbers(&params), versions(&params));
    let state = common::bytes(&sgd.state_dict().unwrap());

    let held = params[2].value().unwrap();
    let error = sgd.step_from(&gradients).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Shared { what, .. } if what == "parameter `p2`"), "{error}");
    assert_eq!((numbers(&params), versions(&params)), (before, old));
    assert_eq!(common::bytes(&sgd.state_dict().unwrap()), state);
    assert!(params.iter().all(|l| l.is_resident()));
    drop(held);

    let states = sgd.state_dict().unwrap();
    let error = sgd.step_from(&gradients).unwrap_err().to_string();
    assert!(error.contains("state tensor") && error.contains("p0"), "{error}");
    drop(states);
    sgd.step_from(&gradients).unwrap();
    assert_eq!(sgd.steps(), 3);
}

#[test]
fn values_replaced_in_a_leaf_are_taken_over() {
    let cpu = Cpu::new();
    for dtype in [DType::F32, DType::BF16] {
        let (a, b) = (leaves(&cpu, &SHAPES, dtype), leaves(&cpu, &SHAPES, dtype));
        let mut replaced = AdamW::over(AdamWConfig::default(), &a).unwrap();
        let fresh = tensor(&cpu, SHAPES[1], dtype, 77);
        a[1].set(fresh.clone()).unwrap();
        b[1].set(fresh.clone()).unwrap();
        let mut from_start = AdamW::over(AdamWConfig::default(), &b).unwrap();
        train(&mut replaced, &a, 0..2);
        train(&mut from_start, &b, 0..2);
        assert_eq!(numbers(&a), numbers(&b), "{dtype}");
        assert_eq!(
            fresh.to_f64s().unwrap(),
            tensor(&cpu, SHAPES[1], dtype, 77).to_f64s().unwrap(),
            "not written through"
        );
    }
}

#[test]
fn half_parameters_follow_their_master_copies() {
    let cpu = Cpu::new();
    for dtype in [DType::F16, DType::BF16] {
        let halves = leaves(&cpu, &SHAPES, dtype);
        let params: Vec<_> = halves
            .iter()
            .map(|l| Leaf::new(&l.name(), l.value().unwrap().to_dtype(DType::F32).unwrap()).unwrap())
            .collect();
        let config = AdamWConfig { lr: 1e-3, ..Default::default() };
        let mut half = AdamW::over(config.clone(), &halves).unwrap();
        let mut full = AdamW::over(config, &params).unwrap();
        let (mut of_half, mut of_full) = (half.alloc_gradients().unwrap(), full.alloc_gradients().unwrap());
        for k in 0..20 {
            fill(&mut of_half, &halves, k);
            of_full.zero();
            for (h, p) in halves.iter().zip(&params) {
                let grad = of_half.get(h).unwrap().unwrap().to_dtype(DType::F32).unwrap();
                of_full.set(p, &grad).unwrap();
            }
            half.step_from(&of_half).unwrap();
            full.step_from(&of_full).unwrap();
        }
        let state = half.state_dict().unwrap();
        for (h, p) in halves.iter().zip(&params) {
            let exact = p.value().unwrap();
            let master = &state.iter().find(|(n, _)| *n == format!("master.{}", h.name())).unwrap().1;
            assert_eq!(master.to_f64s().unwrap(), exact.to_f64s().unwrap(), "the master copy is the f32 run");
            let rounded = exact.to_dtype(dtype).unwrap().to_f64s().unwrap();
            assert_eq!(h.value().unwrap().to_f64s().unwrap(), rounded, "the parameter is it, rounded");
        }
    }
}

#[test]
fn mixed_dtypes_and_f64_have_a_buffer_each() {
    let cpu = Cpu::new();
    let mut params = leaves(&cpu, &SHAPES[..2], DType::F64);
    params.push(Leaf::new("half", tensor(&cpu, &[6], DType::BF16, 3)).unwrap());
    params.push(Leaf::new("single", tensor(&cpu, &[6], DType::F32, 4)).unwrap());
    let mut adam = Adam::over(AdamConfig { lr: 0.1, eps: 1e-12, ..Default::default() }, &params).unwrap();
    assert_eq!(
        adam.params().iter().map(|p| p.layout().dtype()).collect::<Vec<_>>(),
        [DType::F64, DType::BF16, DType::F32]
    );
    let mut gradients = adam.alloc_gradients().unwrap();
    fill(&mut gradients, &params, 0);
    clip_grad_norm(&mut gradients, 1e-3, NormOrder::L2).unwrap();
    let before = numbers(&params);
    adam.step_from(&gradients).unwrap();
    let after = numbers(&params);
    // Adam's first update has the size of the learning rate, for gradients of any magnitude.
    let grads: Vec<f64> = common::values(15, 0);
    for (i, g) in grads.iter().enumerate().filter(|(_, g)| g.abs() > 1e-3) {
        assert!((before[0][i] - after[0][i] - 0.1 * g.signum()).abs() < 1e-4, "{i}");
    }
    assert!(before.iter().zip(&after).all(|(b, a)| b != a));
}

#[test]
fn what_cannot_be_optimized_is_refused_by_name() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, DType::F32);
    let text = |r: numcore::Result<()>| r.unwrap_err().to_string();
    let muon = text(Muon::over(MuonConfig::default(), &params).map(drop));
    assert!(["`p1`", "`p2`", "`p3`"].iter().all(|p| muon.contains(p)) && !muon.contains("`p0`"), "{muon}");
    let twice = text(Sgd::over(SgdConfig::default(), [&params[0], &params[0]]).map(drop));
    assert!(twice.contains("`p0`: was given twice"), "{twice}");
    let homonym = Leaf::new("p0", tensor(&cpu, &[1], DType::F32, 0)).unwrap();
    assert!(text(Sgd::over(SgdConfig::default(), [&params[0], &homonym]).map(drop)).contains("`p0`: two parameters"));
    let whole = Leaf::new("ids", Tensor::zeros(&cpu, [2], DType::I64).unwrap()).unwrap();
    assert!(text(Sgd::over(SgdConfig::default(), [whole]).map(drop)).contains("`ids`"));
    let range = text(Adam::over(AdamConfig { betas: [0.9, 1.0], ..Default::default() }, &params).map(drop));
    assert!(range.contains("`betas`") && range.contains("[0, 1)"), "{range}");
    let nesterov = SgdConfig { nesterov: true, ..Default::default() };
    assert!(text(Sgd::over(nesterov, &params).map(drop)).contains("Nesterov"));
    let absent = Leaf::new("gone", tensor(&cpu, &[2], DType::F32, 0)).unwrap();
    absent.take();
    assert!(text(Sgd::over(SgdConfig::default(), [absent]).map(drop)).contains("`gone`"));
    let other = Sgd::over(SgdConfig::default(), leaves(&cpu, &[&[7]], DType::F32)).unwrap();
    let mut sgd = Sgd::over(SgdConfig::default(), &params).unwrap();
    assert!(text(sgd.step_from(&other.alloc_gradients().unwrap())).contains("laid out"));
}

#[test]
fn rates_and_options_change_between_steps() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &[&[4]], DType::F32);
    let mut sgd = Sgd::over(SgdConfig { lr: 1.0, ..Default::default() }, &params).unwrap();
    let mut gradients = sgd.alloc_gradients().unwrap();
    fill(&mut gradients, &params, 0);
    let moved = |sgd: &mut Sgd<Cpu>| {
        let before = numbers(&params)[0].clone();
        sgd.step_from(&gradients).unwrap();
        let grad = common::values(4, 0);
        (before[1] - numbers(&params)[0][1]) / grad[1]
    };
    assert!((moved(&mut sgd) - 1.0).abs() < 1e-5);
    sgd.set_lr(0.5).unwrap();
    assert!((moved(&mut sgd) - 0.5).abs() < 1e-5);
    sgd.set_config(0, |c| c.maximize = true).unwrap();
    assert!((moved(&mut sgd) + 0.5).abs() < 1e-5);
    assert!(sgd.set_config(0, |c| c.momentum = 0.9).unwrap_err().to_string().contains("momentum_buffer"));
    assert!(sgd.set_lr(-1.0).is_err() && sgd.lrs() == [0.5]);
    sgd.set_schedule(Arc::new(|base: f64, step: u64| base * step as f64));
    assert_eq!(sgd.lrs(), [1.5], "three steps were taken");
    assert!((moved(&mut sgd) + 1.5).abs() < 1e-5);
}

#[test]
fn combined_optimizers_step_as_one() {
    let cpu = Cpu::new();
    let shapes: [&[usize]; 3] = [&[4, 3], &[3], &[3, 5]];
    let (a, b) = (leaves(&cpu, &shapes, DType::F32), leaves(&cpu, &shapes, DType::F32));
    let muon = |p: [&Arc<Leaf<Cpu>>; 2]| Muon::over(MuonConfig::default(), p).unwrap();
    let adam = |p: &Arc<Leaf<Cpu>>| AdamW::over(AdamWConfig::default(), [p]).unwrap();
    let mut both = Combined::new(vec![Box::new(muon([&a[0], &a[2]])), Box::new(adam(&a[1]))]).unwrap();
    train(&mut both, &a, 0..3);
    let (mut m, mut w) = (muon([&b[0], &b[2]]), adam(&b[1]));
    let (mut of_m, mut of_w) = (m.alloc_gradients().unwrap(), w.alloc_gradients().unwrap());
    for k in 0..3 {
        of_m.zero();
        of_w.zero();
        for (i, leaf) in b.iter().enumerate() {
            let grad = tensor(&cpu, shapes[i], DType::F32, 1000 * k + i);
            if i == 1 { of_w.set(leaf, &grad).unwrap() } else { of_m.set(leaf, &grad).unwrap() }
        }
        m.step_from(&of_m).unwrap();
        w.step_from(&of_w).unwrap();
    }
    assert_eq!(numbers(&a), numbers(&b));
    let twice = Combined::<Cpu>::new(vec![Box::new(adam(&b[1])), Box::new(adam(&b[1]))]);
    assert!(twice.err().unwrap().to_string().contains("`p1`"));

    let held = a[1].value().unwrap();
    let before = numbers(&a);
    let mut gradients = both.alloc_gradients().unwrap();
    fill(&mut gradients, &a, 9);
    assert!(both.step_from(&gradients).is_err());
    assert_eq!(numbers(&a), before, "the first is not updated when the second cannot be");
    drop(held);
    both.step_from(&gradients).unwrap();

    let mut plain = Gradients::new();
    a.iter().zip(&b).for_each(|(l, g)| plain.set(l, g.value().unwrap()).unwrap());
    let (launched, before) = (both.steps(), numbers(&a));
    (0..2).for_each(|_| both.step_with(&plain).unwrap());
    assert!(both.steps() == launched + 2 && before.iter().zip(numbers(&a)).all(|(b, a)| *b != a));
}

#[test]
fn decay_is_for_matrices() {
    let params = leaves(&NullRuntime::new(), &SHAPES, DType::F32);
    let (decayed, others) = split_decay(&params);
    let names = |of: &[Arc<Leaf<NullRuntime>>]| of.iter().map(|l| l.name().to_string()).collect::<Vec<_>>();
    assert_eq!((names(&decayed), names(&others)), (vec!["p0".into(), "p3".into()], vec!["p1".into(), "p2".into()]));
}
