//! User-defined operations with a hand-written gradient, for computations that no pointwise program or composition
//! expresses.

use std::sync::Arc;

use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Backprop, Bits, Outs, Saves},
};

use crate::{Var, anomaly, is_grad_enabled, node::NodeCall};

/// Waits for a gradient that is under way.
pub type ArrivingGradient<R> = Box<dyn FnOnce() -> Result<Tensor<R>>>;

/// An operation with a hand-written gradient.
pub trait Function<R: Runtime>: Send + Sync {
    /// The name of the function in messages.
    fn name(&self) -> &'static str;
    /// Computes the outputs of the function from its inputs.
    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>>;
    /// The inputs and outputs that [`backward`](Function::backward) reads; all of them by default.
    fn saves(&self) -> Saves {
        Saves { inputs: Bits::ALL, outputs: Bits::ALL }
    }
    /// The runtime to make zeros on, for a function whose [`backward`](Function::backward) runs in every backward pass that reaches the
    /// function, with a gradient of zeros where its output took no part in the loss. A function whose gradient is a collective is one: the
    /// other ranks may have a gradient, and would wait. A pass reaches the function if what it starts from was computed from one of its
    /// outputs; a loss that was not is given `0 · output` in addition. None by default: without a gradient the function is passed over.
    fn always(&self) -> Option<&R> {
        None
    }
    /// Whether the gradient of this function, of one input and one output, is under way for a while: that of a collective. A backward pass then
    /// calls [`send_gradient`](Function::send_gradient) in place of [`backward`](Function::backward), and computes the gradients of the leaves
    /// that the nodes after this one read while the gradient travels.
    fn sends_gradient(&self) -> bool {
        false
    }
    /// Sends the gradient of the output, for a function that [`sends_gradient`](Function::sends_gradient). What is given back waits for that of
    /// the input.
    fn send_gradient(&self, upstream: Tensor<R>) -> Result<ArrivingGradient<R>> {
        let _ = upstream;
        Err(Error::internal(self.name(), "sends no gradient"))
    }
    /// Gives the gradient of each wanted input. Because it is written over variables, it can be differentiated again.
    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()>;
}

/// Applies a [`Function`] to `ins` and records it.
#[track_caller]
pub fn apply_function<R: Runtime>(function: Arc<dyn Function<R>>, ins: &[&Var<R>]) -> Result<Outs<Var<R>>> {
    let tensors = ins.iter().map(|v| v.value()).collect::<Result<Vec<_>>>()?;
    let outs = function.forward(&tensors)?;
    if anomaly::looks_at_values() {
        anomaly::check_outputs(function.name(), ins, &outs)?;
    }
    if !is_grad_enabled() || ins.iter().all(|v| v.edge.is_none()) {
        for edge in ins.iter().filter_map(|v| v.edge.as_ref()) {
            crate::mode::note_read(edge)?;
        }
        return Ok(outs.into_iter().map(Var::new).collect());
    }
    let mut outs = Var::recorded(NodeCall::Function(function), ins, outs.into_iter().collect())?;
    outs.iter_mut().for_each(|out| out.recompute_as(ins));
    Ok(outs)
}
