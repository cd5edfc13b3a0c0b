//! Partial gradients, of which ranks along tensor have parts.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Result, Runtime};

use super::DataParallel;
use crate::{
    strategy::{GradLoan, Strategy},
    unused::Unused,
};

impl<R: Runtime> DataParallel<R> {
    /// Sums partial gradients over the tensor axis. A parameter that no rank used stays without a gradient.
    pub(super) fn sum_partial_gradients(&mut self) -> Result<()> {
        let mut leaves = self.used_along_tensor()?;
        leaves.retain(|leaf| self.tensor.is_partial(leaf));
        let own = leaves.iter().map(|leaf| Ok((leaf.clone(), self.lend_grad(leaf)?.take())));
        let own = own.collect::<Result<Vec<_>>>()?;
        let sums = self.tensor.sum_gradients(own)?;
        leaves.iter().zip(sums).try_for_each(|(leaf, sum)| self.restore_grad(leaf, GradLoan::new(vec![sum], 0)))
    }

    /// The parameters that this step updates: those used by any rank of the tensor axis. Zeros their gradients where
    /// this rank did not use them.
    fn used_along_tensor(&mut self) -> Result<Vec<Arc<Leaf<R>>>> {
        if !self.tensor.is_cut() {
            return Ok(Vec::new());
        }
        let own = self.leaves.iter().map(|leaf| Ok(self.gradients().get(leaf)?.is_some()));
        let own = own.collect::<Result<Vec<bool>>>()?;
        let used = match self.options.unused {
            Unused::Allow => self.tensor.used_anywhere(&own)?,
            Unused::Error => own.clone(),
        };
        let all: Vec<_> = self.leaves.iter().cloned().zip(own).zip(used).filter(|(_, used)| *used).collect();
        for ((leaf, _), _) in all.iter().filter(|((_, here), _)| !here) {
            let mut slot = self.lend_grad(leaf)?.take();
            slot.zero()?;
            self.restore_grad(leaf, GradLoan::new(vec![slot], 0))?;
        }
        Ok(all.into_iter().map(|((leaf, _), _)| leaf).collect())
    }
}
