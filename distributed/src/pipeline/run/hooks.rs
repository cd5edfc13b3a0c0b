//! Hooks of a run, for the work that belongs to a stage as a whole: the place of gradients, their reduction, and
//! gathers of parameters.

use std::{collections::BTreeMap, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad, Var};
use numcore::{Result, Runtime, Tensor, TensorMut, ops::Apply};

use crate::pipeline::Compute;

/// Calls of a [`Pipeline`](super::Pipeline) for a stage, in the order of this rank's row. An error ends the run on
/// every rank.
///
/// Ranks of the same stages in several replicas get equal calls in equal order, so hooks may be collectives of such a
/// group. Hooks must not wait for a collective among the ranks of one pipeline. These reach it at different times, and
/// some wait for this rank.
#[doc(alias("param_grads"))]
pub trait StageHooks<R: Runtime> {
    /// The hook of a backward pass through the stage: B, I, which makes no weight gradient, or W. `last` is true for
    /// the stage's last weight gradient in this run, after which buckets may be sent.
    fn gradients(&mut self, pass: Compute, last: bool) -> Result<&mut dyn BackwardHook<R>>;

    /// Called after all micro-batches' gradients of the stage. They can be reduced over the data-parallel ranks, unless
    /// they were sent in the last backward pass already.
    fn reduce_grad(&mut self, stage: usize) -> Result<()> {
        let _ = stage;
        Ok(())
    }

    /// Gathers the sharded parameters of a stage that is about to be used.
    fn unshard(&mut self, stage: usize) -> Result<()> {
        let _ = stage;
        Ok(())
    }

    /// Frees the gathered parameters of a stage that is not used for a while.
    fn reshard(&mut self, stage: usize) -> Result<()> {
        let _ = stage;
        Ok(())
    }
}

/// A hook for each stage of this rank, by stage; nothing is reduced.
impl<R: Runtime, H: BackwardHook<R>> StageHooks<R> for BTreeMap<usize, H> {
    fn gradients(&mut self, Compute { stage, .. }: Compute, _: bool) -> Result<&mut dyn BackwardHook<R>> {
        match self.get_mut(&stage) {
            Some(hook) => Ok(hook),
            None => Err(numcore::Error::internal("pipeline", format!("there is no hook for stage {stage}"))),
        }
    }
}

/// The hooks of an evaluation: there is no backward pass.
pub(super) struct NoHooks;

impl<R: Runtime> StageHooks<R> for NoHooks {
    fn gradients(&mut self, Compute { stage, .. }: Compute, _: bool) -> Result<&mut dyn BackwardHook<R>> {
        Err(numcore::Error::internal("pipeline evaluation", format!("stage {stage} has no gradients")))
    }
}

/// Keeps the gradients of a stage's inputs and hands all others on.
pub(super) struct InputHook<'a, R: Runtime> {
    inputs: &'a [Var<R>],
    grads: Vec<Option<Tensor<R>>>,
    inner: &'a mut dyn BackwardHook<R>,
}

impl<'a, R: Runtime> InputHook<'a, R> {
    pub(super) fn new(inputs: &'a [Var<R>], inner: &'a mut dyn BackwardHook<R>) -> Self {
        InputHook { inputs, grads: vec![None; inputs.len()], inner }
    }

    /// The gradients of the inputs that need one. An unused input gets zeros, so that the other rank never waits in
    /// vain.
    pub(super) fn into_gradients(self) -> Result<Vec<Tensor<R>>> {
        let wanted = self.inputs.iter().zip(self.grads).filter(|(input, _)| input.requires_grad());
        let zeros = |input: &Var<R>| Tensor::zeros(input.runtime(), input.spec().shape, input.spec().dtype);
        wanted.map(|(input, grad)| grad.map_or_else(|| zeros(input), Ok)).collect()
    }

    fn input(&self, leaf: &Arc<Leaf<R>>) -> Option<usize> {
        self.inputs.iter().position(|input| input.as_leaf().is_some_and(|own| Arc::ptr_eq(own, leaf)))
    }
}

impl<R: Runtime> BackwardHook<R> for InputHook<'_, R> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        if self.input(leaf).is_some() { Ok(()) } else { self.inner.on_leaf_needed(leaf) }
    }

    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        if self.input(leaf).is_some() { Ok(None) } else { self.inner.grad_slot(leaf) }
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        match (self.input(leaf), grad) {
            (Some(i), LeafGrad::Own(grad)) => {
                self.grads[i] = Some(grad);
                Ok(())
            }
            (_, grad) => self.inner.on_leaf_grad_ready(leaf, grad),
        }
    }
}
