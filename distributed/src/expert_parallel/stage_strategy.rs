//! Training of a pipeline's stage that has experts, or none.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Result, Runtime, Tensor, ops::PointwiseOps};

use super::ExpertParallel;
use crate::{
    comm::Communicator,
    train::{GradLoan, StageStrategy, wide},
};

/// Both strategies of a stage as one; a stage without experts has that of the rest alone.
impl<R: Runtime, S: StageStrategy<R>> StageStrategy<R> for ExpertParallel<R, S> {
    fn squared_norm(&self, counts: &dyn Fn(&Arc<Leaf<R>>) -> bool) -> Result<Tensor<R>> {
        let rest = self.rest.squared_norm(counts)?;
        let Some(experts) = &self.experts else { return Ok(rest) };
        let wide = wide(self.comm.runtime());
        rest.to_dtype(wide)?.add(&experts.squared_norm(counts)?.to_dtype(wide)?)
    }

    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>> {
        self.of(leaf).lend_grad(leaf)
    }

    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()> {
        self.of(leaf).restore_grad(leaf, sum)
    }

    fn rate(&self) -> Option<f64> {
        self.rest.rate().or_else(|| self.experts.as_ref()?.rate())
    }

    fn unshard(&mut self) -> Result<()> {
        self.both().try_for_each(S::unshard)
    }

    fn reshard(&mut self) -> Result<()> {
        self.both().try_for_each(S::reshard)
    }
}
