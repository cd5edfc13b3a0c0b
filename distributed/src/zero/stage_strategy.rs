//! Sharded training of a stage of a pipeline.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Result, Runtime, Tensor};

use super::Sharded;
use crate::{
    comm::ReduceOp,
    train::{GradLoan, StageStrategy, not_of},
};

/// Every rank keeps its shard. A tied parameter must be a unit of its own: only then is it cut alike in all stages.
impl<R: Runtime> StageStrategy<R> for Sharded<R> {
    fn squared_norm(&self, counts: &dyn Fn(&Arc<Leaf<R>>) -> bool) -> Result<Tensor<R>> {
        self.tensor.sum(self.squares(counts)?.combine(&self.groups.shard, ReduceOp::Sum)?)
    }

    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>> {
        self.engine.lock().unit_of(leaf).map_or_else(|| Err(not_of(leaf)), |unit| unit.lend_grad())
    }

    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()> {
        self.engine.lock().unit_of(leaf).map_or_else(|| Err(not_of(leaf)), |unit| unit.restore_grad(sum))
    }

    fn rate(&self) -> Option<f64> {
        self.rates().first().copied()
    }

    fn unshard(&mut self) -> Result<()> {
        self.engine.lock().prefetch_all()
    }

    fn reshard(&mut self) -> Result<()> {
        self.engine.lock().release_prefetched()
    }
}
