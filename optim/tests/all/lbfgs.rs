//! L-BFGS: the losses of PyTorch's closure, one step for each call.

use std::{collections::BTreeSet, sync::Arc};

use autograd::{Leaf, Var};
use numcore::{
    DType, Result, Tensor,
    ops::{PointwiseOps, ReduceOps, ViewOps, cat},
};
use optim::{Config, FlatOptimizer, HyperValue, Lbfgs, LbfgsConfig, Optimizer, OptimizerCore};
use runtime_cpu::Cpu;
use serde_json::Value;

use crate::common::{Params, bytes, copies, fill, leaves, numbers};

fn params(rt: &Cpu) -> Params<Cpu> {
    leaves(rt, &[&[3], &[2, 2]], DType::F64)
}

/// The loss of a function of the reference.
fn loss(function: &str, params: &[Arc<Leaf<Cpu>>]) -> Result<Var<Cpu>> {
    let (a, b) = (params[0].var(), params[1].var());
    if function == "quadratic" {
        let rt = params[0].runtime();
        let weights = Var::new(Tensor::from_slice(rt, [2, 2], &[1.0, 10.0, 100.0, 3.0])?);
        return weights.mul(&b.sub(0.5)?.square()?)?.sum_all()?.add(&a.sub(&b.sum_all()?)?.square()?.sum_all()?);
    }
    if function == "quartic" {
        let first = a.sub(1.0)?.square()?.sum_all()?;
        let second = b.square()?.sub(&a.sum_all()?)?.square()?.sum_all()?;
        return first.add(&second)?.add(&a.square()?.square()?.sum_all()?.mul(0.1)?);
    }
    let x = cat(&[&a, &b.reshape([4])?], 0)?;
    if function == "log" {
        return x.sub(2.0)?.square()?.mul(100.0)?.add(1.0)?.log()?.sum_all();
    }
    let (head, tail) = (x.narrow(0, 0, 6)?, x.narrow(0, 1, 6)?);
    let near = tail.sub(&head.square()?)?.square()?.mul(100.0)?;
    near.add(&head.sub(1.0)?.square()?)?.sum_all()
}

/// The losses of `n` steps.
fn losses(optimizer: &mut dyn Optimizer<Cpu>, function: &str, params: &[Arc<Leaf<Cpu>>], n: usize) -> Vec<f64> {
    let step = |_| {
        let loss = loss(function, params).unwrap();
        optimizer.backward(&loss).unwrap();
        optimizer.step().unwrap();
        loss.item().unwrap()
    };
    (0..n).map(step).collect()
}

fn cases() -> Vec<(String, LbfgsConfig, Vec<f64>)> {
    let file: Value = serde_json::from_str(include_str!("../data/authors.json")).unwrap();
    let case = |case: &Value| {
        let (attrs, mut config) = (&case["attrs"], LbfgsConfig::default());
        for (name, value) in attrs.as_object().unwrap() {
            let number = value.as_f64().or(value.as_bool().map(|on| f64::from(u8::from(on)))).unwrap();
            config.set(name, &[number]).unwrap();
        }
        let losses = case["losses"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        (case["function"].as_str().unwrap().to_string(), config, losses)
    };
    file["lbfgs"].as_array().unwrap().iter().map(case).collect()
}

#[test]
fn steps_are_the_calls_of_pytorchs_closure() {
    for (function, config, want) in cases() {
        let params = params(&Cpu::new());
        let mut lbfgs = Lbfgs::over(config.clone(), &params).unwrap();
        let got = losses(&mut lbfgs, &function, &params, want.len());
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() <= 1e-7 * want, "{function} {config:?}, step {k}: {got} and not {want}");
        }
    }
}

/// Stopped after any step, in the middle of searches too: the bits of a run that goes on.
#[test]
fn every_step_is_resumed_to_the_bit() {
    let (rt, config) = (Cpu::new(), LbfgsConfig { history_size: 3, lr: 40.0, ..Default::default() });
    let build = |params: &Params<Cpu>| {
        let first = FlatOptimizer::in_groups(config.clone()).group(&params[..1], |_| {}).unwrap();
        first.group(&params[1..], |_| {}).unwrap()
    };
    let end = |optimizer: &Lbfgs<Cpu>, params: &Params<Cpu>| (numbers(params), bytes(&optimizer.state_dict().unwrap()));
    let (all, mut stages) = (params(&rt), BTreeSet::new());
    let mut whole = build(&all);
    losses(&mut whole, "quartic", &all, 24);
    for k in 0..24 {
        let (before, after) = (params(&rt), params(&rt));
        let mut saved = build(&before);
        losses(&mut saved, "quartic", &before, k);
        stages.insert(saved.config(0).search.numbers()[0] as u32);
        let mut resumed = build(&after);
        resumed.load_state_dict(&copies(saved.state_dict().unwrap())).unwrap();
        after.iter().zip(&before).for_each(|(to, from)| to.set(from.value().unwrap().copy().unwrap()).unwrap());
        losses(&mut resumed, "quartic", &after, 24 - k);
        assert_eq!(end(&resumed, &after), end(&whole, &all), "after {k}");
    }
    assert_eq!(stages.len(), 3, "{stages:?}");
}

#[test]
fn what_it_cannot_do_is_an_error() {
    let params = params(&Cpu::new());
    let large = Lbfgs::over(LbfgsConfig { history_size: 101, ..Default::default() }, &params).err().unwrap();
    assert!(large.to_string().contains("100 changes"), "{large}");
    let mut lbfgs = Lbfgs::over(LbfgsConfig::default(), &params).unwrap();
    let mut gradients = lbfgs.alloc_gradients().unwrap();
    fill(&mut gradients, &params, 1);
    let before = bytes(&lbfgs.state_dict().unwrap());
    let unknown = lbfgs.step_from(&gradients).unwrap_err().to_string();
    assert!(unknown.contains("L-BFGS") && unknown.contains("`backward`"), "{unknown}");
    assert_eq!(bytes(&lbfgs.state_dict().unwrap()), before);
}

/// A length at which the loss is no number is too long: the search comes back.
#[test]
fn a_loss_that_is_not_finite_is_a_high_one() {
    let params = params(&Cpu::new());
    let mut lbfgs = Lbfgs::over(LbfgsConfig { lr: 40.0, ..Default::default() }, &params).unwrap();
    let mut seen = Vec::new();
    for _ in 0..40 {
        let (a, b) = (params[0].var(), params[1].var());
        let barrier = b.square().unwrap().neg().unwrap().add(1.5).unwrap().log().unwrap().sum_all().unwrap();
        let loss = a.square().unwrap().sum_all().unwrap().sub(&barrier).unwrap();
        lbfgs.backward(&loss).unwrap();
        lbfgs.step().unwrap();
        seen.push(loss.item().unwrap());
    }
    let least = -4.0 * 1.5f64.ln();
    assert!(seen.iter().any(|x| x.is_nan()) && (seen[39] - least).abs() < 1e-9, "{seen:?}");
}

/// At a minimum nothing moves any more, and nothing is lost.
#[test]
fn it_rests_where_the_loss_is_flat() {
    let params = params(&Cpu::new());
    let mut lbfgs = Lbfgs::over(LbfgsConfig::default(), &params).unwrap();
    let last = losses(&mut lbfgs, "quadratic", &params, 60)[59];
    let there = numbers(&params);
    assert!(last < 1e-9, "{last}");
    losses(&mut lbfgs, "quadratic", &params, 3);
    assert_eq!(numbers(&params), there);
}
