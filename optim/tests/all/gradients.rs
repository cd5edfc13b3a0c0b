//! Where gradients come from: backward passes into the optimizer's buffers, slots that were lost, gradients from
//! elsewhere.
#![allow(clippy::needless_range_loop)]

use crate::common::{fill, leaves, numbers, tensor};
use autograd::{BackwardHook, Gradients, Leaf, backward_with_hooks};
use nn::{Forward, ModuleExt};
use numcore::{
    DType, ErrorKind,
    ops::{MatmulOps, PointwiseOps, ReduceOps},
};
use optim::*;
use runtime_cpu::Cpu;

const SHAPES: [&[usize]; 4] = [&[5, 3], &[70], &[], &[2, 3, 4]];

#[test]
fn a_pending_backward_is_stale_after_a_step() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &[&[3, 3]], DType::F32);
    let mut sgd = Sgd::over(SgdConfig::default(), &params).unwrap();
    let w = params[0].var();
    let loss = w.matmul(&w).unwrap().sum_all().unwrap();
    let mut gradients = sgd.alloc_gradients().unwrap();
    fill(&mut gradients, &params, 0);
    sgd.step_from(&gradients).unwrap();
    gradients.zero();
    let error = backward_with_hooks(&loss, &mut gradients).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Stale { .. }), "{error}");
    gradients.zero();
    let loss = w.matmul(&w).unwrap().sum_all().unwrap();
    backward_with_hooks(&loss, &mut gradients).unwrap();
}

#[test]
fn sweeps_land_in_the_buffers_and_add() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &[&[3, 2], &[2], &[4]], DType::F32);
    let elsewhere = Leaf::new("x", tensor(&cpu, &[5, 3], DType::F32, 50)).unwrap();
    let sgd = Sgd::over(SgdConfig::default(), &params).unwrap();
    let loss = || {
        let y = elsewhere.var().matmul(&params[0].var()).unwrap().add(&params[1].var()).unwrap();
        y.square().unwrap().sum_all().unwrap()
    };
    let plain: Gradients<Cpu> = loss().backward().unwrap();
    let mut flat = sgd.alloc_gradients().unwrap();
    backward_with_hooks(&loss(), &mut flat).unwrap();
    let of = |g: &FlatGradients<Cpu>, i: usize| g.get(&params[i]).unwrap().unwrap().to_f64s().unwrap();
    for i in 0..2 {
        assert_eq!(of(&flat, i), plain.get(&params[i]).unwrap().to_f64s().unwrap());
    }
    assert!(flat.get(&params[2]).unwrap().is_none() && flat.get(&elsewhere).unwrap().is_none());
    assert!(flat.flats()[0].whole().unwrap().shares_memory_with(&flat.get(&params[1]).unwrap().unwrap()));

    let once = of(&flat, 0);
    backward_with_hooks(&loss(), &mut flat).unwrap();
    assert_eq!(of(&flat, 0), once.iter().map(|x| 2.0 * x).collect::<Vec<_>>(), "micro-batches add");
    flat.multiply(0.5).unwrap();
    assert_eq!(of(&flat, 0), once, "a factor is applied when read");
    backward_with_hooks(&loss(), &mut flat).unwrap();
    assert_eq!(of(&flat, 0), once.iter().map(|x| 2.0 * x).collect::<Vec<_>>(), "and before more is added");
    flat.zero();
    backward_with_hooks(&loss(), &mut flat).unwrap();
    assert_eq!(of(&flat, 0), once);
}

#[test]
fn slots_that_a_failed_sweep_lost_come_back() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &SHAPES, DType::F32);
    let mut sgd = Sgd::over(SgdConfig::default(), &params).unwrap();
    let mut gradients = sgd.alloc_gradients().unwrap();
    fill(&mut gradients, &params[..1], 0);
    drop(gradients.grad_slot(&params[1]).unwrap().unwrap());
    assert!(matches!(sgd.step_from(&gradients).unwrap_err().kind(), ErrorKind::Lent { .. }));
    assert!(params.iter().all(|l| l.is_resident()));
    fill(&mut gradients, &params, 0);
    sgd.step_from(&gradients).unwrap();
}

#[test]
fn plain_gradients_give_the_same_step() {
    let cpu = Cpu::new();
    let (a, b) = (leaves(&cpu, &SHAPES, DType::F32), leaves(&cpu, &SHAPES, DType::F32));
    let config = AdamWConfig { lr: 0.1, ..Default::default() };
    let mut with_flat = AdamW::over(config.clone(), &a).unwrap();
    let mut with_plain = AdamW::over(config, &b).unwrap();
    let used = [0, 1, 3];
    for k in 0..3 {
        let mut flat = with_flat.alloc_gradients().unwrap();
        let mut plain = Gradients::new();
        for i in used {
            let grad = tensor(&cpu, SHAPES[i], DType::F32, 1000 * k + i);
            flat.set(&a[i], &grad).unwrap();
            plain.set(&b[i], grad).unwrap();
        }
        with_flat.step_from(&flat).unwrap();
        with_plain.step_with(&plain).unwrap();
    }
    assert_eq!(numbers(&a), numbers(&b));
}

/// Hands gradients on in memory of their own: it gives no slots.
struct WithoutSlots<'a>(&'a mut FlatGradients<Cpu>);

impl BackwardHook<Cpu> for WithoutSlots<'_> {
    fn on_leaf_grad_ready(
        &mut self,
        leaf: &std::sync::Arc<Leaf<Cpu>>,
        grad: autograd::LeafGrad<Cpu>,
    ) -> numcore::Result<()> {
        self.0.on_leaf_grad_ready(leaf, grad)
    }
}

#[test]
fn what_comes_without_a_slot_is_added_after_a_pending_factor() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &[&[1]], DType::F32);
    let sgd = Sgd::over(SgdConfig::default(), &params).unwrap();
    let with = |slots: bool| {
        let mut gradients = sgd.alloc_gradients().unwrap();
        for k in 0..2 {
            let loss = params[0].var().mul(10.0).unwrap().sum_all().unwrap();
            match slots {
                true => backward_with_hooks(&loss, &mut gradients).unwrap(),
                false => backward_with_hooks(&loss, &mut WithoutSlots(&mut gradients)).unwrap(),
            }
            if k == 0 {
                clip_grad_norm(&mut gradients, 1.0, NormOrder::L2).unwrap();
            }
        }
        gradients.get(&params[0]).unwrap().unwrap().to_vec::<f32>().unwrap()[0]
    };
    assert_eq!(with(false), with(true));
    assert!((with(false) - 11.0).abs() < 1e-5);
}

#[test]
fn gradients_in_f32_are_read_changed_and_put_back() {
    let cpu = Cpu::new();
    let params = leaves(&cpu, &[&[3]], DType::BF16);
    let sgd = Sgd::over(SgdConfig::default(), &params).unwrap();
    let mut gradients = FlatGradients::in_f32(&sgd.params()).unwrap();
    gradients.set(&params[0], &tensor(&cpu, &[3], DType::BF16, 1)).unwrap();
    // A number that `bf16` does not have.
    let noisy = gradients.get(&params[0]).unwrap().unwrap().mul(0.0).unwrap().add(1.0 + 1.0 / 1024.0).unwrap();
    assert_eq!(noisy.dtype(), DType::F32);
    gradients.set(&params[0], &noisy).unwrap();
    assert_eq!(gradients.get(&params[0]).unwrap().unwrap().to_f64s().unwrap(), [1.0 + 1.0 / 1024.0; 3]);
    // One of a loop's own comes in the buffer's type, too.
    gradients.on_leaf_grad_ready(&params[0], autograd::LeafGrad::Own(noisy)).unwrap();
    assert_eq!(gradients.get(&params[0]).unwrap().unwrap().to_f64s().unwrap(), [2.0 + 2.0 / 1024.0; 3]);
    let error = gradients.set(&params[0], &tensor(&cpu, &[3], DType::F64, 1)).unwrap_err().to_string();
    assert!(error.contains("bf16 [3], or f32 [3]") && error.contains("f64"), "{error}");
}

/// Frozen before, a parameter has no place in the optimizer; frozen afterwards, it can be trained again.
#[test]
fn a_parameter_that_was_frozen_when_the_optimizer_was_made_is_refused() {
    let cpu = Cpu::new();
    let model = nn::Sequential::new()
        .push(nn::Linear::new(&nn::Init::new(&cpu, 1), 2, 2).unwrap())
        .push(nn::Linear::new(&nn::Init::new(&cpu, 2), 2, 1).unwrap());
    let x = autograd::Var::new(tensor(&cpu, &[3, 2], DType::F32, 1));
    let step = |sgd: &mut dyn Optimizer<Cpu>| {
        let loss = model.forward(&x)?.sum_all()?;
        sgd.backward(&loss).and_then(|()| sgd.step())
    };
    let first = || model.named_parameters().remove(0).1.value().unwrap().to_f64s().unwrap();
    let mut after = Sgd::new(&model, SgdConfig::default()).unwrap();
    model.freeze_where(nn::under("0"));
    let mut before = Sgd::new(&model, SgdConfig::default()).unwrap();
    let start = first();
    step(&mut before).unwrap();
    assert_eq!(first(), start);
    model.unfreeze_where(nn::under("0"));
    let refuses = |optimizer: &mut dyn Optimizer<Cpu>| {
        let error = step(optimizer).unwrap_err().to_string();
        assert!(error.contains("`0.") && error.contains("was frozen when the optimizer was made"), "{error}");
    };
    refuses(&mut before);
    refuses(&mut Combined::new(vec![Box::new(before)]).unwrap());
    step(&mut after).unwrap();
    assert_ne!(first(), start);
}
