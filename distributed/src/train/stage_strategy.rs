//! What strategies are asked beside where a model is cut into stages, each trained by a strategy of its own.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, Result, Runtime, Tensor, TensorMut};

use super::Strategy;
use crate::checkpoint::Checkpointed;

/// A strategy that can train one stage of a pipeline over the ranks that have this stage. What concerns several stages, norms and tied
/// parameters, their trainer does; for that it asks more than [`Strategy`] has.
pub trait StageStrategy<R: Runtime>: Strategy<R> + Checkpointed<R> {
    /// The square of the L2 norm of the summed gradients of the parameters that count, of all ranks' parts: a scalar on the device.
    fn squared_norm(&self, counts: &dyn Fn(&Arc<Leaf<R>>) -> bool) -> Result<Tensor<R>>;
    /// Takes out what this rank keeps of a trained parameter's summed gradient, to be added to that of its copies in other stages;
    /// equal ranks of the stages keep equal elements.
    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>>;
    /// Takes it back.
    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()>;
    /// The learning rate of the next update (of the first group); none if there are no parameters.
    fn rate(&self) -> Option<f64>;

    /// The stage is about to be used: what is sharded of its parameters can be prefetched.
    fn unshard(&mut self) -> Result<()> {
        Ok(())
    }

    /// The stage is not used for a while.
    fn reshard(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Memory of summed gradients, of which one piece is lent. [`DataParallel`](crate::ddp::DataParallel) and [`Sharded`](crate::zero::Sharded)
/// make it.
pub struct GradLoan<R: Runtime> {
    pieces: Vec<TensorMut<R>>,
    own: usize,
}

impl<R: Runtime> GradLoan<R> {
    /// Lends piece `own` of memory that was split.
    pub(crate) fn new(pieces: Vec<TensorMut<R>>, own: usize) -> Self {
        GradLoan { pieces, own }
    }

    /// The piece.
    pub(crate) fn take(&mut self) -> TensorMut<R> {
        self.pieces.remove(self.own)
    }

    /// The piece comes back.
    pub(crate) fn give(&mut self, piece: TensorMut<R>) {
        self.pieces.insert(self.own, piece);
    }

    /// All pieces, in order.
    pub(crate) fn into_pieces(self) -> Vec<TensorMut<R>> {
        self.pieces
    }
}

/// The error of a parameter that is not a strategy's.
pub(crate) fn not_of<R: Runtime>(leaf: &Leaf<R>) -> Error {
    Error::state(leaf.name().to_string(), "is tied, but no parameter of its stage's optimizer")
}
