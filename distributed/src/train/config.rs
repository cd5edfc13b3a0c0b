//! Options of a training step.

use numcore::{Error, Result};
use optim::LossScaler;

use super::BufferSync;

/// The treatment of an optimizer's hyper-parameters (learning rate, betas, weight decay …) in checkpoints. They are
/// saved for each parameter by its name, so any strategy restores them from any other, in any groups and at any cut.
///
/// The learning rate among them is the base rate. An active schedule continues to set the rate of each step from the
/// base rate. A schedule that scales the base rate scales the restored one; a schedule with absolute rates is not
/// changed.
#[doc(alias("param_groups"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HyperParameters {
    /// Hyper-parameters are the configuration's: neither saved nor restored.
    #[default]
    Configured,
    /// Hyper-parameters are saved. Loading a checkpoint keeps those of the configuration.
    Saved,
    /// Hyper-parameters are saved, and restored from the loaded checkpoint, as PyTorch's `load_state_dict` does. A
    /// checkpoint without them is an error. So is one with different values for parameters that are in one group now.
    Restored,
}

/// Options of a training step beside the update, which is the optimizer's.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingConfig {
    /// The number of micro-batches in a step. Their gradients add up before anything is exchanged.
    pub accumulation: usize,
    /// The largest global norm of gradients; larger ones are scaled down to it. Without one there is no clipping.
    pub max_norm: Option<f64>,
    /// Dynamic loss scaling, for `f16`: all ranks skip a step together.
    pub loss_scaling: Option<LossScaler>,
    /// True if all ranks skip an update together when a gradient of the step is not finite. Reads every gradient of
    /// every step, and waits for the device. With loss scaling updates are skipped in any case.
    pub skip_non_finite: bool,
    /// The synchronization of buffers that every rank changes by itself, such as running statistics.
    pub buffers: BufferSync,
    /// The treatment of the optimizer's hyper-parameters in checkpoints.
    pub hyper_parameters: HyperParameters,
}

impl Default for TrainingConfig {
    /// One micro-batch, neither clipping nor scaling, buffers of each rank's own, no hyper-parameters in checkpoints.
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
