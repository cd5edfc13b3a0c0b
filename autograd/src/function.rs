//! Operations of one's own with a hand-written gradient, for what no pointwise program or composition expresses.

use std::sync::Arc;

use numcore::{
    Result, Runtime, Tensor,
    ops::{Backprop, Bits, Outs, Saves},
};

use crate::{Var, is_grad_enabled, node::NodeCall};

/// An operation with a hand-written gradient.
pub trait Function<R: Runtime>: Send + Sync {
    /// Its name in messages.
    fn name(&self) -> &'static str;
    /// Computes the outputs.
    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>>;
    /// What [`backward`](Function::backward) reads; everything, unless said otherwise.
    fn saves(&self) -> Saves {
        Saves { inputs: Bits::ALL, outputs: Bits::ALL }
    }
    /// Gives the gradient of each wanted input; written over variables, it can be differentiated again.
    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()>;
}

/// Applies a [`Function`].
#[track_caller]
pub fn apply_function<R: Runtime>(function: Arc<dyn Function<R>>, ins: &[&Var<R>]) -> Result<Outs<Var<R>>> {
    let tensors = ins.iter().map(|v| v.value()).collect::<Result<Vec<_>>>()?;
    let outs = function.forward(&tensors)?;
    if !is_grad_enabled() || ins.iter().all(|v| v.edge.is_none()) {
        for edge in ins.iter().filter_map(|v| v.edge.as_ref()) {
            crate::mode::note_read(edge)?;
        }
        return Ok(outs.into_iter().map(Var::new).collect());
    }
    Var::recorded(NodeCall::Function(function), ins, outs.into_iter().collect())
}
