//! Unfreezing: training parameters from a later step than the first.

use numcore::{Result, Runtime};

use super::{DataParallel, data_parallel::from_last};
use crate::comm::Collectives;

/// The name, in errors, of the parameters that ranks must unfreeze alike.
pub(crate) const UNFROZEN: &str = "the parameters that were frozen, and are trained from now on,";

impl<R: Runtime> DataParallel<R> {
    /// Adds parameters that were frozen from the start, and no longer are, to the optimizer and the buckets. An error
    /// unless all ranks unfreeze the same ones.
    pub(super) fn unfreeze(&mut self) -> Result<()> {
        let unfrozen: Vec<_> = self.frozen.iter().filter(|leaf| leaf.requires_grad()).cloned().collect();
        if unfrozen.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = unfrozen.iter().map(|leaf| leaf.name().to_string()).collect();
        self.tensor.everyone().agree(UNFROZEN, names.join(" ").as_bytes())?;
        self.optimizer.add_params(&unfrozen)?;
        self.whole = self.optimizer.update_whole(&|leaf| self.tensor.placed(leaf))?.into_iter().collect();
        self.frozen.retain(|leaf| !leaf.requires_grad());
        self.cut_buckets(&from_last(&self.leaves))?;
        // Has buckets rebuilt once a step has shown the order in which all gradients become final.
        self.begun = 0;
        Ok(())
    }
}
