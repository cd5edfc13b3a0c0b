//! What a step does.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, Result, Runtime};
use optim::{AdamW, AdamWConfig, LossScaler, Optimizer, ParamGroups, split_decay};

use super::BufferSync;

/// What every trainer's step does, and the optimizer it makes if it is given none.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingConfig {
    /// Learning rate of AdamW.
    pub learning_rate: f64,
    /// Weight decay of AdamW, of matrices alone.
    pub weight_decay: f64,
    /// Micro-batches in a step: their gradients add up before anything is exchanged.
    pub accumulation: usize,
    /// The largest norm of all gradients together; larger ones are scaled down to it.
    pub max_norm: Option<f64>,
    /// Dynamic loss scaling, for `f16`: all ranks skip a step together.
    pub loss_scaling: Option<LossScaler>,
    /// What becomes of buffers, running statistics for one, which every rank changes by itself.
    pub buffers: BufferSync,
}

impl Default for TrainingConfig {
    /// AdamW at 1e-3 with decay 0.01, one micro-batch, neither clipping nor scaling, buffers that are each rank's own.
    fn default() -> Self {
        let (learning_rate, weight_decay) = (1e-3, 1e-2);
        let (accumulation, max_norm, loss_scaling, buffers) = (1, None, None, BufferSync::default());
        TrainingConfig { learning_rate, weight_decay, accumulation, max_norm, loss_scaling, buffers }
    }
}

impl TrainingConfig {
    pub(crate) fn check(&self) -> Result<()> {
        if self.accumulation == 0 {
            return Err(Error::argument("TrainingConfig", "a step has at least one micro-batch; `accumulation` is 0"));
        }
        if self.max_norm.is_some_and(|n| n.is_nan() || n < 0.0) {
            return Err(Error::argument("TrainingConfig", format!("`max_norm` cannot be {:?}", self.max_norm)));
        }
        Ok(())
    }

    /// The optimizer that trainers make of it where they shard: AdamW with decay for matrices, of parameters known by name alone.
    pub fn adamw_groups(&self) -> ParamGroups<AdamWConfig> {
        let defaults = AdamWConfig { lr: self.learning_rate, weight_decay: self.weight_decay, ..Default::default() };
        ParamGroups::new(defaults).group(|_, spec| spec.shape.rank() < 2, |c| c.weight_decay = 0.0)
    }

    /// AdamW with decay for matrices.
    pub(crate) fn adamw<R: Runtime>(&self, leaves: Vec<Arc<Leaf<R>>>) -> Result<Box<dyn Optimizer<R>>> {
        let (decayed, others) = split_decay(leaves);
        let mut optimizer = AdamW::in_groups(AdamWConfig { lr: self.learning_rate, ..Default::default() });
        for (leaves, decay) in [(decayed, self.weight_decay), (others, 0.0)] {
            if !leaves.is_empty() {
                optimizer = optimizer.group(leaves, |c| c.weight_decay = decay)?;
            }
        }
        Ok(Box::new(optimizer))
    }
}
