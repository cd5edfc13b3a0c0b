//! Sharded training of a stage of a pipeline.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Result, Runtime, Tensor};

use super::Sharded;
use crate::{
    comm::ReduceOp,
    train::{LentSum, StageStrategy, not_of},
};

/// Every rank keeps its shard. A tied parameter must be a unit of its own: only then is it cut alike in all stages.
impl<R: Runtime> StageStrategy<R> for Sharded<R> {
    fn squared_norm(&self, counts: &dyn Fn(&Arc<Leaf<R>>) -> bool) -> Result<Tensor<R>> {
        self.squares(counts)?.combine(&self.groups.shard, ReduceOp::Sum)
    }

    fn lend_sum(&mut self, leaf: &Arc<Leaf<R>>) -> Result<LentSum<R>> {
        self.engine.lock().unit_of(leaf).map_or_else(|| Err(not_of(leaf)), |unit| unit.lend_sum())
    }

    fn restore_sum(&mut self, leaf: &Arc<Leaf<R>>, sum: LentSum<R>) -> Result<()> {
        self.engine.lock().unit_of(leaf).map_or_else(|| Err(not_of(leaf)), |unit| unit.restore_sum(sum))
    }

    fn rate(&self) -> Option<f64> {
        self.rates().first().copied()
    }

    fn unshard(&mut self) -> Result<()> {
        self.engine.lock().hold()
    }

    fn reshard(&mut self) -> Result<()> {
        self.engine.lock().unhold()
    }
}
