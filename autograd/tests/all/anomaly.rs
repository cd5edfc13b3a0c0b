//! Anomaly detection names the operation, its line and the parameters before it where NaN begins.

use std::sync::Arc;

use crate::common::{self, constant, cpu, leaf, run_checkpointed, values};
use autograd::{Function, Var, apply_function, backward, detect_anomaly};
use numcore::{
    ErrorKind, Result, Tensor,
    ops::{Backprop, MatmulOps, PointwiseOps, ReduceOps},
};
use runtime_cpu::Cpu;

fn message<T>(outcome: Result<T>) -> String {
    let error = outcome.map(drop).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Anomaly { .. }), "{error}");
    error.to_string()
}

#[test]
fn the_first_operation_with_a_nan_is_named() {
    let (x, w) = (constant(&cpu(), [1, 2], &[1.0, -1.0]), leaf(&cpu(), "fc.weight", [2, 2], &[1.0, 0.0, 0.0, 1.0]));
    let line = line!() + 1;
    let said = message(detect_anomaly(|| x.matmul(&w)?.log()?.mul(2.0)?.sum_all()));
    assert!(said.contains("log: NaN begins here, in output 0"), "{said}");
    assert!(said.contains("nearest parameters before it: `fc.weight`"), "{said}");
    assert!(said.contains(&format!("anomaly.rs:{line}")), "{said}");
    // Without it, and after it, nothing is looked at.
    assert!(x.log().is_ok());
}

#[test]
fn nan_that_was_there_before_and_infinities_are_let_be() {
    let x = constant(&cpu(), [2], &[f64::NAN, 0.0]);
    let y = detect_anomaly(|| x.add(1.0)?.recip()?.log()).unwrap();
    assert!(values(&y)[0].is_nan());
    assert_eq!(values(&detect_anomaly(|| constant(&cpu(), [1], &[0.0]).log()).unwrap()), [f64::NEG_INFINITY]);
}

#[test]
fn gradients_are_looked_at() {
    // √0 has the value 0 and the gradient ∞, and ∞ · 0 is NaN in the node before it.
    let w = leaf(&cpu(), "w", [2], &[0.0, 4.0]);
    let line = line!() + 2;
    let said = message(detect_anomaly(|| {
        let scaled = w.mul(0.0)?;
        backward(&scaled.sqrt()?.sum_all()?)
    }));
    assert!(said.contains("NaN begins here in backward, in the gradient of input 0"), "{said}");
    assert!(said.contains(&format!("anomaly.rs:{line}")) && said.contains("`w`"), "{said}");
}

/// The identity, whose gradient is NaN.
struct Broken;

impl Function<Cpu> for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }
    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].clone()])
    }
    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        let upstream = cx.upstream(0)?.unwrap();
        cx.give_value(0, &upstream.mul(f64::NAN)?)
    }
}

#[test]
fn functions_and_segments_are_looked_into() {
    let w = leaf(&cpu(), "w", [2], &[1.0, 2.0]);
    let of_function = || apply_function(Arc::new(Broken), &[&w])?[0].sum_all();
    assert!(message(detect_anomaly(|| backward(&of_function()?))).contains("broken: NaN begins here in backward"));
    let segment = |v: &[Var<Cpu>]| Ok(vec![v[0].mul(0.0)?.sqrt()?.sum_all()?]);
    let said = message(detect_anomaly(|| backward(&run_checkpointed(&[&w], segment)?[0])));
    assert!(said.contains("in the gradient of input 0"), "{said}");
}

#[test]
fn sound_steps_are_what_they_are() {
    let w = leaf(&cpu(), "w", [2], &[1.0, 2.0]);
    let loss = || w.square()?.exp()?.sum_all();
    let (looked, plain) = (detect_anomaly(|| backward(&loss()?)).unwrap(), backward(&loss().unwrap()).unwrap());
    assert_eq!(common::grad_of(&looked, &w), common::grad_of(&plain, &w));
}

/// Zero over zero, in a forward pass somebody wrote by hand.
struct BrokenForward;

impl Function<Cpu> for BrokenForward {
    fn name(&self) -> &'static str {
        "broken_forward"
    }
    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].mul(f64::NAN)?])
    }
    fn backward(&self, _: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn functions_are_looked_at_in_forward() {
    let w = leaf(&cpu(), "w", [2], &[1.0, 2.0]);
    let said = message(detect_anomaly(|| apply_function(Arc::new(BrokenForward), &[&w])?[0].sum_all()));
    assert!(said.contains("broken_forward: NaN begins here, in output 0"), "{said}");
}
