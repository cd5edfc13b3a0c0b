//! Data-parallel training of a stage of a pipeline.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Result, Runtime, Tensor};

use super::DataParallel;
use crate::train::{GradLoan, StageStrategy};

/// Every rank keeps all of it.
impl<R: Runtime> StageStrategy<R> for DataParallel<R> {
    fn squared_norm(&self, counts: &dyn Fn(&Arc<Leaf<R>>) -> bool) -> Result<Tensor<R>> {
        self.tensor.sum(self.squares(counts)?)
    }

    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>> {
        let (buffer, range) = self.place_of(leaf)?;
        let slot = self.buckets_mut().gradients_mut().flats_mut()[buffer].lend(range)?;
        Ok(GradLoan::new(vec![slot], 0))
    }

    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()> {
        let (buffer, _) = self.place_of(leaf)?;
        let flat = &mut self.buckets_mut().gradients_mut().flats_mut()[buffer];
        sum.into_pieces().into_iter().try_for_each(|slot| flat.restore(slot))
    }

    fn rate(&self) -> Option<f64> {
        self.optimizer.lrs().first().copied()
    }
}
