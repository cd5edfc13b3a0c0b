//! What a step does.

use numcore::{Error, Result};
use optim::LossScaler;

use super::BufferSync;

/// What a training step does beside the update, which is the optimizer's.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingConfig {
    /// Micro-batches in a step: their gradients add up before anything is exchanged.
    pub accumulation: usize,
    /// The largest norm of all gradients together; larger ones are scaled down to it.
    pub max_norm: Option<f64>,
    /// Dynamic loss scaling, for `f16`: all ranks skip a step together.
    pub loss_scaling: Option<LossScaler>,
    /// Leaves the update out, on all ranks together, where a gradient of a step is not finite: looks at every gradient of every step, and
    /// waits for the device. (With loss scaling this is done in any case.)
    pub skip_non_finite: bool,
    /// What becomes of buffers, running statistics for one, which every rank changes by itself.
    pub buffers: BufferSync,
}

impl Default for TrainingConfig {
    /// One micro-batch, neither clipping nor scaling, buffers that are each rank's own.
    fn default() -> Self {
        TrainingConfig {
            accumulation: 1,
            max_norm: None,
            loss_scaling: None,
            skip_non_finite: false,
            buffers: BufferSync::default(),
        }
    }
}

impl TrainingConfig {
    pub(crate) fn check(&self) -> Result<()> {
        if self.accumulation == 0 {
            let why = "a step has at least one micro-batch; `accumulation` is 0";
            return Err(Error::config("TrainingConfig", "accumulation", why));
        }
        if self.max_norm.is_some_and(|n| n.is_nan() || n < 0.0) {
            let why = format!("`max_norm` cannot be {:?}", self.max_norm);
            return Err(Error::config("TrainingConfig", "max_norm", why));
        }
        Ok(())
    }
}
