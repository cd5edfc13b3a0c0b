//! Anomaly detection names the operation, its line and the parameters before it where NaN begins.

use std::sync::Arc;

use crate::common::{self, constant, cpu, leaf, run_checkpointed, values};
use autograd::{Function, Var, apply_function, backward, detect_anomaly, inspect_calls};
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

/// The calls that an inspector saw: op, the input that a gradient is of, line, leaves, inputs and outputs.
type Seen = Vec<(&'static str, Option<usize>, u32, Vec<String>, Vec<Vec<f64>>, Vec<Vec<f64>>)>;

fn inspected<T>(f: impl FnOnce() -> Result<T>) -> (Result<T>, Seen) {
    let (to, from) = std::sync::mpsc::channel();
    let all = |tensors: &[Tensor<Cpu>]| tensors.iter().map(|t| t.to_f64s()).collect::<Result<Vec<_>>>();
    let result = inspect_calls::<Cpu, _>(
        move |call| {
            let leaves = call.leaves.iter().map(|leaf| leaf.name().to_string()).collect();
            let seen = (call.op, call.gradient_of, call.at.line(), leaves, all(&call.inputs)?, all(call.outputs)?);
            to.send(seen).map_err(|_| numcore::Error::argument("test", "is over"))
        },
        f,
    );
    (result, from.into_iter().collect())
}

#[test]
fn an_inspector_receives_all_results_and_changes_none() {
    let w = leaf(&cpu(), "w", [2], &[2.0, 3.0]);
    let line = line!() + 1;
    let loss = || w.square()?.mul(&constant(&cpu(), [2], &[10.0, 100.0]))?.sum_all();
    let (gradients, seen) = inspected(|| backward(&loss()?));
    let at = |op, of, leaves: &[&str], ins: &[&[f64]], out: &[f64]| {
        let leaves = leaves.iter().map(|name| name.to_string()).collect();
        (op, of, line, leaves, ins.iter().map(|x| x.to_vec()).collect(), vec![out.to_vec()])
    };
    let expected: Seen = vec![
        at("square", None, &["w"], &[&[2.0, 3.0]], &[4.0, 9.0]),
        at("mul", None, &[], &[&[4.0, 9.0], &[10.0, 100.0]], &[40.0, 900.0]),
        at("sum", None, &[], &[&[40.0, 900.0]], &[940.0]),
        at("reshape", None, &[], &[&[940.0]], &[940.0]),
        at("reshape", Some(0), &[], &[&[1.0]], &[1.0]),
        at("sum", Some(0), &[], &[&[1.0]], &[1.0, 1.0]),
        at("mul", Some(0), &[], &[&[1.0, 1.0]], &[10.0, 100.0]),
        at("square", Some(0), &["w"], &[&[10.0, 100.0]], &[40.0, 600.0]),
    ];
    assert_eq!(seen, expected);
    let of_w = |all: autograd::Gradients<Cpu>| all.of(&w).unwrap().to_f64s().unwrap();
    assert_eq!(of_w(gradients.unwrap()), of_w(backward(&loss().unwrap()).unwrap()));
    // A function is a call too, and what is outside is not inspected.
    let (_, seen) = inspected(|| apply_function(Arc::new(BrokenForward), &[&w]));
    assert_eq!(seen.len(), 1);
    loss().unwrap();
}

/// Products are added into the memory of a gradient that has others in it.
#[test]
fn gradients_that_are_summed_have_the_same_bits_when_looked_at() {
    let n = 48;
    let wave = |k: usize| (0..n * n).map(|i| ((i * k) as f32 * 0.37).sin()).collect::<Vec<_>>();
    let tensor = |k| Tensor::from_slice(&cpu(), [n, n], &wave(k)).unwrap();
    let w = Var::leaf("w", tensor(1)).unwrap();
    let loss = || {
        let products = [2, 3, 5].map(|k| Var::new(tensor(k)).matmul(&w)?.square()?.sum_all());
        let [a, b, c] = products;
        a?.add(&b?)?.add(&c?)
    };
    let bits = |all: Result<autograd::Gradients<Cpu>>| all.unwrap().of(&w).unwrap().to_bytes().unwrap();
    let plain = bits(backward(&loss().unwrap()));
    assert_eq!(bits(detect_anomaly(|| backward(&loss()?))), plain);
    assert_eq!(bits(inspect_calls::<Cpu, _>(|_| Ok(()), || backward(&loss()?))), plain);
}

#[test]
fn an_error_of_an_inspector_ends_the_pass() {
    let w = leaf(&cpu(), "w", [1], &[2.0]);
    for (end, count) in [(("exp", None), 2), (("exp", Some(0)), 7)] {
        let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = calls.clone();
        let stop = move |call: &autograd::InspectedCall<'_, Cpu>| {
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if (call.op, call.gradient_of) == end { Err(numcore::Error::argument("stop", "here")) } else { Ok(()) }
        };
        let result = inspect_calls(stop, || backward(&w.square()?.exp()?.sum_all()?));
        assert!(result.map(drop).unwrap_err().to_string().contains("here"));
        assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), count);
    }
}
