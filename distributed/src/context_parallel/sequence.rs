//! Sequences gathered and scattered in their own order: each is the gradient of the other.

use std::sync::Arc;

use autograd::{Function, Var, apply_function};
use numcore::{
    Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Backprop, Bits, Saves, ViewOps},
};

use super::order::ZigZag;
use crate::comm::{Collectives, Comm, Communicator, Named, ReduceOp};

/// A collective on a sequence of shape `[B, G, T, D]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SequenceStep {
    /// All-gather: parts of all ranks become the whole sequence, which each rank uses differently.
    Gather,
    /// Reduce-scatter: each rank gets its part of the sum of all ranks' values.
    Scatter,
}

/// An exchange, with the ranks that make it.
pub(super) struct SequenceExchange<R: Runtime> {
    pub(super) what: SequenceStep,
    pub(super) comm: Comm<R>,
    pub(super) order: ZigZag,
    /// The label of the collective calls, in errors.
    pub(super) of: Arc<str>,
}

impl<R: Runtime> SequenceExchange<R> {
    /// Exchanges a tensor.
    pub(super) fn run(&self, x: &Tensor<R>) -> Result<Tensor<R>> {
        let comm = Named::over(&self.comm, &self.of);
        match self.what {
            SequenceStep::Gather => self.gathered(&comm, x),
            SequenceStep::Scatter => self.scattered(&comm, x),
        }
    }

    /// Exchanges a variable, on the tape.
    pub(super) fn apply(self, x: &Var<R>) -> Result<Var<R>> {
        Ok(apply_function(Arc::new(self), &[x])?.remove(0))
    }

    fn gathered(&self, comm: &Comm<R>, x: &Tensor<R>) -> Result<Tensor<R>> {
        let (shape, n) = (*x.shape(), comm.size());
        let out = TensorMut::alloc(x.runtime(), Shape::new(&[n * shape.numel()])?, x.dtype())?;
        let all = comm.all_gather(x, out)?.wait()?.freeze()?.reshape([n, shape.numel()])?;
        let parts = (0..n).map(|rank| all.select(0, rank)?.reshape(shape)).collect::<Result<Vec<_>>>()?;
        self.order.joined(&parts, 2)
    }

    fn scattered(&self, comm: &Comm<R>, x: &Tensor<R>) -> Result<Tensor<R>> {
        let parts = self.order.dealt(x, 2)?;
        let own = TensorMut::alloc(x.runtime(), parts.shape().with(0, 1), x.dtype())?;
        comm.reduce_scatter(&parts, own, ReduceOp::Sum)?.wait()?.freeze()?.squeeze(0)
    }
}

impl<R: Runtime> Function<R> for SequenceExchange<R> {
    fn name(&self) -> &'static str {
        match self.what {
            SequenceStep::Gather => "gather_sequence",
            SequenceStep::Scatter => "scatter_sequence",
        }
    }

    fn forward(&self, ins: &[Tensor<R>]) -> Result<Vec<Tensor<R>>> {
        Ok(vec![self.run(&ins[0])?])
    }

    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::NONE }
    }

    fn always(&self) -> Option<&R> {
        Some(self.comm.runtime())
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<R>>) -> Result<()> {
        let what = match self.what {
            SequenceStep::Gather => SequenceStep::Scatter,
            SequenceStep::Scatter => SequenceStep::Gather,
        };
        let of = format!("{}, backward", self.of).into();
        let back = SequenceExchange { what, comm: self.comm.clone(), order: self.order, of };
        let upstream = cx.grad()?;
        cx.give_value(0, &back.apply(&upstream)?)
    }
}
