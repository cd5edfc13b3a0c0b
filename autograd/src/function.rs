//! User-defined operations with a hand-written gradient, for computations that no pointwise program or composition
//! expresses.

use std::sync::Arc;

use numcore::{
    Result, Runtime, Tensor,
    ops::{Backprop, Bits, Outs, Saves},
};

use crate::{Var, anomaly, is_grad_enabled, node::NodeCall};

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
