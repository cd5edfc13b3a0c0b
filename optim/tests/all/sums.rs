//! Rules that adapt to sums over all parameters, beside others.

use autograd::Leaf;
use numcore::{DType, ops::PointwiseOps};
use optim::*;
use runtime_cpu::Cpu;
use std::sync::Arc;

use crate::common::{Params, fill, leaves, numbers, tensor, train};

const SHAPES: [&[usize]; 4] = [&[5, 3], &[7], &[2, 2], &[4]];

/// Parameters 0 and 2, and the others.
fn parted(params: &Params<Cpu>) -> [Params<Cpu>; 2] {
    [[0, 2], [1, 3]].map(|own| own.map(|i: usize| params[i].clone()).into())
}

/// Each rule sees the sums of its own parameters: the bits of optimizers that know of no other.
fn apart<A: UpdateRule, B: UpdateRule>(a: A, b: B) {
    let rt = Cpu::new();
    let new = || leaves(&rt, &SHAPES, DType::F64);
    let alone = new();
    fn own<C: UpdateRule>(rule: &C, all: &Params<Cpu>, own: &[Arc<Leaf<Cpu>>]) {
        let mut optimizer = FlatOptimizer::over(rule.clone(), own).unwrap();
        let mut gradients = optimizer.alloc_gradients().unwrap();
        for k in 0..6 {
            gradients.zero();
            for (i, leaf) in all.iter().enumerate().filter(|(_, leaf)| own.iter().any(|own| own.id() == leaf.id())) {
                gradients.set(leaf, &tensor(leaf.runtime(), SHAPES[i], DType::F64, 1000 * k + i)).unwrap();
            }
            optimizer.step_from(&gradients).unwrap();
        }
    }
    let [first, second] = parted(&alone);
    own(&a, &alone, &first);
    own(&b, &alone, &second);
    let both = new();
    let [first, second] = parted(&both);
    let all: Vec<Box<dyn Optimizer<Cpu>>> = vec![
        Box::new(FlatOptimizer::over(a.clone(), &first).unwrap()),
        Box::new(FlatOptimizer::over(b.clone(), &second).unwrap()),
    ];
    train(&mut Combined::new(all).unwrap(), &both, 0..6);
    assert_eq!(numbers(&both), numbers(&alone), "{} and {}, combined", A::NAME, B::NAME);
    let groups = new();
    let others = |name: &str, _: &numcore::ops::Spec| ["p1", "p3"].contains(&name);
    let source = ParamGroups::new(a).others(others, ParamGroups::new(b));
    let mut one = IntoOptimizer::<Cpu>::into_source(source).optimizer(groups.clone()).unwrap();
    train(&mut *one, &groups, 0..6);
    assert_eq!(numbers(&groups), numbers(&alone), "{} and {}, of groups", A::NAME, B::NAME);
}

#[test]
fn a_rule_sees_the_sums_of_its_own_parameters() {
    let prodigy = ProdigyConfig { d0: 0.01, d_coef: 0.2, ..Default::default() };
    let other = ProdigyConfig { d0: 0.03, weight_decay: 0.1, ..Default::default() };
    apart(prodigy.clone(), AdamWConfig::default());
    apart(SgdConfig::default(), prodigy.clone());
    apart(prodigy, other);
}

/// Buckets give parameters another order in memory: the sums have the same bits.
#[test]
fn the_order_of_parameters_does_not_matter() {
    let trained = |moved: bool| {
        let params = leaves(&Cpu::new(), &SHAPES, DType::F64);
        let config = ProdigyConfig { d0: 0.01, d_coef: 0.2, ..Default::default() };
        let mut prodigy = Prodigy::over(config, &params).unwrap();
        if moved {
            prodigy.reorder(&|leaf| (1 + params.iter().position(|own| own.id() == leaf.id()).unwrap()) % 3).unwrap();
        }
        train(&mut prodigy, &params, 0..9);
        (numbers(&params), prodigy.config(0).clone())
    };
    assert_eq!(trained(false), trained(true));
}

/// A schedule that ends at 0 leaves the estimate and the parameters.
#[test]
fn a_rate_of_zero_changes_nothing() {
    let params = leaves(&Cpu::new(), &SHAPES, DType::F64);
    let mut prodigy = Prodigy::over(ProdigyConfig { d0: 0.01, d_coef: 0.2, ..Default::default() }, &params).unwrap();
    train(&mut prodigy, &params, 0..4);
    prodigy.set_lr(0.0).unwrap();
    let (before, values) = (prodigy.config(0).clone(), numbers(&params));
    train(&mut prodigy, &params, 4..6);
    let after = ProdigyConfig { d_used: before.d_used, ..prodigy.config(0).clone() };
    assert_eq!((after, numbers(&params)), (before, values));
}

/// A gradient that is not finite leaves the estimate: the loop decides what is done about it.
#[test]
fn gradients_that_are_not_finite_leave_the_estimate() {
    let params = leaves(&Cpu::new(), &SHAPES, DType::F64);
    let mut prodigy = Prodigy::over(ProdigyConfig { d0: 0.01, d_coef: 0.2, ..Default::default() }, &params).unwrap();
    let mut gradients = prodigy.alloc_gradients().unwrap();
    fill(&mut gradients, &params, 1);
    let infinite = tensor(&Cpu::new(), &[7], DType::F64, 1).mul(f64::INFINITY).unwrap();
    gradients.set(&params[1], &infinite).unwrap();
    prodigy.step_from(&gradients).unwrap();
    assert_eq!((prodigy.config(0).d, prodigy.config(0).d_numerator), (0.01, 0.0));
}

/// Three rules, of which two adapt: each to its own sums, however many others have.
#[test]
fn rules_in_rules_adapt() {
    let params = leaves(&Cpu::new(), &SHAPES, DType::F64);
    let rule = ProdigyConfig { d0: 0.01, d_coef: 0.2, ..Default::default() };
    let named = |own: &'static str| move |name: &str, _: &numcore::ops::Spec| name == own;
    let plain = ParamGroups::new(AdamWConfig::default());
    let source = ParamGroups::new(rule.clone()).others(named("p1"), plain).others(named("p3"), ParamGroups::new(rule));
    let mut one = IntoOptimizer::<Cpu>::into_source(source).optimizer(params.clone()).unwrap();
    train(&mut *one, &params, 0..6);
    let groups = one.hyper_parameters().unwrap();
    let estimate = |name: &str| {
        let group = groups.iter().find(|group| group.parameters.iter().any(|own| own == name)).unwrap();
        group.values.iter().find(|(name, _)| name == "d").map(|(_, d)| d[0])
    };
    assert!(estimate("p0").unwrap() > 0.01 && estimate("p3").unwrap() > 0.01, "{groups:?}");
    assert_eq!(estimate("p1"), None);
}

/// A group whose parameters come later begins with the estimate of the others.
#[test]
fn groups_without_parameters_adapt() {
    let params = leaves(&Cpu::new(), &SHAPES, DType::F64);
    let rule = ProdigyConfig { d0: 0.01, d_coef: 0.2, ..Default::default() };
    let source = ParamGroups::new(rule).group(|name, _| name == "p3", |rule| rule.weight_decay = 0.1);
    let mut one = IntoOptimizer::<Cpu>::into_source(source).optimizer(params[..3].to_vec()).unwrap();
    train(&mut *one, &params[..3], 0..6);
    one.add_params(&params[3..]).unwrap();
    let groups = one.hyper_parameters().unwrap();
    let estimates: Vec<f64> = groups.iter().map(|g| g.values.iter().find(|(n, _)| n == "d").unwrap().1[0]).collect();
    assert!(estimates.len() == 2 && estimates[0] > 0.01 && estimates[0] == estimates[1], "{estimates:?}");
}
