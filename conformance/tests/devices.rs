//! Operands, memory, values and gradients of two devices that meet: always an error that names both, on every path to a
//! kernel.

use std::sync::Arc;

use autograd::{Backward, BackwardHook, Gradients, Leaf, LeafGrad, Var};
use numcore::{
    DType, Either, ErrorKind, NullRuntime, Result, Runtime, Shape, Tensor, TensorMut,
    fused::NnOps,
    ops::{self, Input, MatmulOps, Op, PointwiseOps, ReduceOps, cat},
    pointwise::Program,
};
use runtime_cpu::Cpu;

type Both = Either<Cpu, NullRuntime>;

fn runtimes() -> [Both; 2] {
    [Either::A(Cpu::with_threads(1)), Either::B(NullRuntime::new())]
}

fn ones(rt: &Both) -> Tensor<Both> {
    Tensor::ones(rt, [2, 2], DType::F32).unwrap()
}

fn memory(rt: &Both) -> TensorMut<Both> {
    TensorMut::zeros(rt, Shape::from([2, 2]), DType::F32).unwrap()
}

/// Whether it is an error that names both devices.
fn refused<T>(what: &str, outcome: Result<T>) {
    let Err(error) = outcome else { panic!("{what} of two devices is no error") };
    let text = error.to_string();
    assert!(text.contains("cpu") && text.contains("null"), "{what}: {text}");
}

#[test]
fn operands() {
    let [a, b] = runtimes().map(|rt| ones(&rt));
    refused("add", a.add(&b));
    refused("matmul", b.matmul(&a));
    refused("linear", a.linear(&a, Some(&b)));
    refused("softmax cross-entropy", a.where_cond(&b, &a));
    refused("cat", cat(&[&a, &b], 0));
    refused("layer_norm", a.layer_norm(Some(&b), None, 1e-5));
    assert!(
        matches!(a.add(&b).map(drop).unwrap_err().kind(), ErrorKind::Device { op: "add", devices } if devices.len() == 2)
    );
}

#[test]
fn memory_that_is_written() {
    let [cpu, null] = runtimes();
    let (x, y) = (ones(&cpu), ones(&null));
    refused("accumulate", memory(&null).accumulate(&Op::identity(), &[&x]));
    refused("accumulate_view", memory(&null).accumulate_view(&[], &Op::identity(), &[&x]));
    let add = Program::new("add", |[a, b], []| [a + b]);
    let op: Op = ops::Pointwise::new(&add, &[]).into();
    refused("compute_into", Tensor::compute_into(&op, &[&x, &x], |_| Some(memory(&null))));
    let value = Input::Value(&y);
    refused("compute", ops::compute(&cpu, &add, &[value, value], &[], &mut [&mut memory(&cpu)]));
    refused("compute", ops::compute(&cpu, &add, &[value, value], &[], &mut [&mut memory(&null)]));
    refused("update", ops::update(&add, &[&y], &[], &mut [&mut memory(&cpu)]));
}

/// Gives memory of another device for each gradient.
struct Elsewhere(Both);

impl BackwardHook<Both> for Elsewhere {
    fn grad_slot(&mut self, _: &Arc<Leaf<Both>>) -> Result<Option<TensorMut<Both>>> {
        Ok(Some(memory(&self.0)))
    }

    fn on_leaf_grad_ready(&mut self, _: &Arc<Leaf<Both>>, _: LeafGrad<Both>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn values_and_gradients_of_leaves() {
    let [cpu, null] = runtimes();
    let x = Var::leaf("x", ones(&cpu)).unwrap();
    let leaf = x.as_leaf().unwrap();
    refused("a value", leaf.set(ones(&null)));
    refused("a gradient", Gradients::new().set(leaf, ones(&null)));
    refused("a slot", Backward::of(&x.sum_all().unwrap()).unwrap().run(&mut Elsewhere(null.clone())));
    refused(
        "a seed",
        Backward::from(&x.mul(2.0).unwrap(), &Var::new(ones(&null))).and_then(|b| b.run(&mut Gradients::new())),
    );
    assert_eq!(leaf.value().unwrap().device(), cpu.device(), "nothing was changed");
}
