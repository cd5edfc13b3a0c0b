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
    /// Sums partial gradients over the tensor axis, all in flight at once. A parameter that no rank used stays without
    /// a gradient.
    pub(super) fn sum_partial_gradients(&mut self) -> Result<()> {
        let mut works = Vec::new();
        for leaf in self.used_along_tensor()? {
            let Some(comm) = self.tensor.summed_over(&leaf).cloned() else { continue };
            let own = self.lend_grad(&leaf)?.take();
            let work = self.tensor.sum_gradient(&comm, &leaf, own)?;
            works.push((leaf, work));
        }
        for (leaf, work) in works {
            self.restore_grad(&leaf, GradLoan::new(vec![work.wait()?], 0))?;
        }
        Ok(())
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
