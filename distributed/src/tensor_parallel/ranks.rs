//! A communicator as the group over which layers are cut.

use std::sync::Arc;

use autograd::Var;
use nn::parallel::{Exchange, TensorGroup};
use numcore::{Result, Runtime, Tensor};

use crate::{
    comm::{Collectives, Comm, Communicator, Named, ReduceOp, memory},
    differentiable::{all_to_all_parts_of, exchange_of},
};

use super::pieces::linear_in_pieces;

/// The ranks of a communicator, over which a [`TensorPlan`](nn::parallel::TensorPlan) cuts a model.
/// [`Mesh::parallelize`](crate::mesh::Mesh::parallelize) gives layers those along the tensor axis.
#[derive(Clone, Debug)]
pub struct TensorRanks<R: Runtime>(Comm<R>);

impl<R: Runtime> TensorRanks<R> {
    /// The group of the ranks of `comm`.
    pub fn group(comm: &Comm<R>) -> Arc<dyn TensorGroup<R>> {
        Arc::new(TensorRanks(comm.clone()))
    }
}

impl<R: Runtime> TensorGroup<R> for TensorRanks<R> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn exchange(&self, what: Exchange, x: &Var<R>, of: &str) -> Result<Var<R>> {
        exchange_of(what, &self.0, x, of)
    }

    fn linear_in_pieces(
        &self,
        what: Exchange,
        [x, weight]: [&Var<R>; 2],
        bias: Option<&Var<R>>,
        pieces: usize,
        of: &str,
    ) -> Result<Var<R>> {
        linear_in_pieces(what, &self.0, [x, weight], bias, pieces, of)
    }

    fn max(&self, x: &Tensor<R>, of: &str) -> Result<Tensor<R>> {
        Named::over(&self.0, of).all_reduce(memory(x)?, ReduceOp::Max)?.wait()?.freeze()
    }

    fn all_to_all(&self, x: &Var<R>, send: &[usize], recv: &[usize], of: &str) -> Result<Var<R>> {
        all_to_all_parts_of(&self.0, x, send, recv, of)
    }

    fn exchange_bytes(&self, own: &[u8], of: &str) -> Result<Vec<Vec<u8>>> {
        Named::over(&self.0, of).exchange(own)
    }
}
