//! Helpers shared by the tests: a single-threaded CPU, leaves from literals, and a hook that records its calls.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::sync::Arc;

use autograd::{BackwardHook, Gradients, Leaf, LeafGrad, Var, checkpoint};
use numcore::{DType, Result, Runtime, Shape, Tensor};
use runtime_cpu::Cpu;

/// A CPU runtime of one thread, since these tests are about the tape.
pub fn cpu() -> Cpu {
    Cpu::with_threads(1)
}

/// A leaf of `f64` with these values.
pub fn leaf<R: Runtime>(rt: &R, name: &str, shape: impl Into<Shape>, values: &[f64]) -> Var<R> {
    Var::leaf(name, Tensor::from_slice(rt, shape.into(), values).unwrap()).unwrap()
}

/// A constant of `f64` with these values.
pub fn constant<R: Runtime>(rt: &R, shape: impl Into<Shape>, values: &[f64]) -> Var<R> {
    Var::new(Tensor::from_slice(rt, shape.into(), values).unwrap())
}

/// A leaf of zeros: for runtimes that compute nothing.
pub fn blank<R: Runtime>(rt: &R, name: &str, shape: impl Into<Shape>) -> Var<R> {
    Var::leaf(name, Tensor::zeros(rt, shape.into(), DType::F32).unwrap()).unwrap()
}

/// The outputs of a checkpointed segment.
pub fn run_checkpointed<R: Runtime>(
    inputs: &[&Var<R>],
    segment: impl FnOnce(&[Var<R>]) -> Result<Vec<Var<R>>>,
) -> Result<Vec<Var<R>>> {
    let inputs: Vec<Var<R>> = inputs.iter().map(|v| (*v).clone()).collect();
    checkpoint(|| segment(&inputs))
}

/// The leaf behind a leaf variable.
pub fn of<R: Runtime>(var: &Var<R>) -> Arc<Leaf<R>> {
    var.as_leaf().unwrap().clone()
}

/// The values of a variable.
pub fn values<R: Runtime>(var: &Var<R>) -> Vec<f64> {
    var.value().unwrap().to_f64s().unwrap()
}

/// The gradient of a leaf variable.
pub fn grad_of<R: Runtime>(gradients: &Gradients<R>, var: &Var<R>) -> Vec<f64> {
    gradients.of(var).expect("a gradient").to_f64s().unwrap()
}

/// Records the callbacks of a backward pass, and keeps the gradients.
pub struct Log<R: Runtime> {
    pub events: Vec<String>,
    pub gradients: Gradients<R>,
}

impl<R: Runtime> Default for Log<R> {
    fn default() -> Self {
        Log { events: Vec::new(), gradients: Gradients::new() }
    }
}

impl<R: Runtime> Log<R> {
    /// The leaves that became final, in order.
    pub fn ready(&self) -> Vec<&str> {
        self.events.iter().filter_map(|e| e.strip_prefix("ready ")).collect()
    }
}

impl<R: Runtime> BackwardHook<R> for Log<R> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        self.events.push(format!("needed {}", leaf.name()));
        Ok(())
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        self.events.push(format!("ready {}", leaf.name()));
        self.gradients.on_leaf_grad_ready(leaf, grad)
    }
}
