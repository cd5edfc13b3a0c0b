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
    /// Starts the sums of the partial gradients in a bucket, which has the step's sums over the other ranks.
    pub(super) fn start_partial(&mut self, bucket: usize) -> Result<()> {
        if !self.tensor.is_cut() || !self.overlaps_partial {
            return Ok(());
        }
        let members = self.layout.buckets[bucket].members.iter().map(|member| member.leaf.clone()).collect();
        self.start_sums(members)
    }

    /// Waits for the sums of partial gradients over the tensor axis; starts those that could not begin before. A
    /// parameter that no rank used stays without a gradient.
    pub(super) fn sum_partial_gradients(&mut self) -> Result<()> {
        if self.tensor.is_cut() && !self.overlaps_partial {
            let used = self.used_along_tensor()?;
            self.start_sums(used)?;
        }
        let mut sums = std::mem::take(&mut self.partial);
        sums.wait(|leaf, sum| self.restore_grad(leaf, GradLoan::new(vec![sum], 0)))
    }

    fn start_sums(&mut self, leaves: Vec<Arc<Leaf<R>>>) -> Result<()> {
        let partial: Vec<_> = leaves.into_iter().filter(|leaf| self.tensor.is_partial(leaf)).collect();
        let lend = |leaf| Ok((Arc::clone(&leaf), self.lend_grad(&leaf)?.take()));
        let lent = partial.into_iter().map(lend).collect::<Result<Vec<_>>>()?;
        self.partial.start(&self.tensor, lent)
    }

    /// The parameters that this step updates: those used by any rank of the tensor axis. Zeros their gradients where
    /// this rank did not use them.
    fn used_along_tensor(&mut self) -> Result<Vec<Arc<Leaf<R>>>> {
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
