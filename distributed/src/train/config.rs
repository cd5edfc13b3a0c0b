//! What a step does.

use numcore::{Error, Result};
use optim::LossScaler;

use super::BufferSync;

/// What becomes of an optimizer's hyper-parameters (learning rate, betas, weight decay …) in checkpoints, where they are saved for each
/// parameter by its name: any strategy, in any groups and at any cut, takes them over from any other.
///
/// The learning rate among them is the base rate. A schedule that is active goes on setting the rate of each step from the base rate there is: one
/// that scales it scales what was restored, and one with rates of its own is not changed.
#[doc(alias("param_groups"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HyperParameters {
    /// They are the configuration's: neither saved nor taken over.
    #[default]
    Configured,
    /// They are saved, and those of the configuration stay when a checkpoint is loaded.
    Saved,
    /// They are saved, and taken over from the checkpoint that is loaded, as PyTorch's `load_state_dict` does. A checkpoint without them is an
    /// error then, and so is one that has different ones for parameters of one group here.
    Restored,
}

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
    /// What becomes of the optimizer's hyper-parameters in checkpoints.
    pub hyper_parameters: HyperParameters,
}

impl Default for TrainingConfig {
    /// One micro-batch, neither clipping nor scaling, buffers that are each rank's own, hyper-parameters that no checkpoint has.
    fn default() -> Self {
        TrainingConfig {
            accumulation: 1,
            max_norm: None,
            loss_scaling: None,
            skip_non_finite: false,
            buffers: BufferSync::default(),
            hyper_parameters: HyperParameters::default(),
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
