//! User-defined operations with a handwritten gradient, for computations that neither pointwise programs nor
//! compositions of operations express.

use std::sync::Arc;

use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Apply, Backprop, Bits, Outs, Saves},
};

use crate::{
    Var, anomaly, is_grad_enabled, mode::ForwardContext, node::NodeCall, recipe::RecipeCall,
    rematerialize::ScopedRecipe, tangent::no_tangents,
};

/// A closure that waits for a gradient in transit and returns it.
pub type ArrivingGradient<R> = Box<dyn FnOnce() -> Result<Tensor<R>>>;

/// An operation with a handwritten gradient, applied by `apply_function`.
pub trait Function<R: Runtime>: Send + Sync {
    /// The name of the function in error messages.
    fn name(&self) -> &'static str;
    /// Computes the outputs of the function from its inputs.
    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>>;
    /// The inputs and outputs that [`backward`](Function::backward) reads, and the tape therefore saves; all of them by
    /// default.
    fn saves(&self) -> Saves {
        Saves { inputs: Bits::ALL, outputs: Bits::ALL }
    }
    /// The runtime on which zeros are made for a [`backward`](Function::backward) that must always run; `None` by
    /// default.
    ///
    /// With `None`, a function whose outputs received no gradient is skipped. With a runtime, `backward` runs in every
    /// pass that reaches the function, on gradients of zeros where no output took part in the loss. A function whose
    /// gradient is a collective needs this: other ranks may have a gradient, and would wait for this rank.
    ///
    /// A pass reaches the function if one of its roots was computed from an output of the function. To a loss that was
    /// not, add `0 · output`.
    fn always(&self) -> Option<&R> {
        None
    }
    /// Tells whether the gradient of this function, which has one input and one output, is in transit for a while, as a
    /// collective's is.
    ///
    /// A backward pass then calls [`send_gradient`](Function::send_gradient) in place of
    /// [`backward`](Function::backward). During the transfer it computes the gradients of leaves that the consumers of
    /// this function's output read. A pass that records gradients calls `backward`.
    fn sends_gradient(&self) -> bool {
        false
    }
    /// Sends `upstream`, the gradient of the output, for a function that [`sends_gradient`](Function::sends_gradient).
    /// The returned closure waits for the gradient of the input and returns it.
    fn send_gradient(&self, upstream: Tensor<R>) -> Result<ArrivingGradient<R>> {
        let _ = upstream;
        Err(Error::internal(self.name(), "sends no gradient"))
    }
    /// Gives the gradient of each wanted input through `cx`. It computes with variables, so it can be differentiated
    /// again.
    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()>;
}

/// Applies a [`Function`] to `ins` and records it on the tape.
#[track_caller]
pub fn apply_function<R: Runtime>(function: Arc<dyn Function<R>>, ins: &[&Var<R>]) -> Result<Outs<Var<R>>> {
    no_tangents(function.name(), ins)?;
    let context = ForwardContext::here();
    let tensors = ins.iter().map(|v| v.value()).collect::<Result<Vec<_>>>()?;
    let outs = function.forward(&tensors)?;
    if anomaly::looks_at_values() {
        anomaly::check_outputs(function.name(), ins, &outs)?;
    }
    if !is_grad_enabled() || ins.iter().all(|v| v.edge.is_none()) {
        return Ok(outs.into_iter().map(Var::new).collect());
    }
    let recipe = ScopedRecipe::of(
        || RecipeCall::Function(function.clone(), context, outs.iter().map(Apply::spec).collect()),
        ins,
        &outs,
    );
    let mut outs = Var::recorded(NodeCall::Function(function), ins, outs.into_iter().collect(), recipe.as_ref())?;
    outs.iter_mut().for_each(|out| out.recompute_as(ins));
    Ok(outs)
}
