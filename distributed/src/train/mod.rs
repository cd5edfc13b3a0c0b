//! Training steps: forward and backward passes of some micro-batches, and the update, on any number of ranks.
//!
//! [`TrainStep::builder`] makes them; [`Step`] is the trait that loops and wrappers take.

mod api;
mod builder;
mod captured;
mod checkpoint;
mod config;
mod input;
mod metrics;
mod pipeline;
mod push;
#[cfg(test)]
mod reduce_timing;
mod run;
mod step;
mod updates;

pub use api::{Step, StepProperties, WeightedSum};
pub use builder::{StepModel, TrainStepBuilder};
pub use checkpoint::CheckpointNotes;
pub use config::{HyperParameters, TrainingConfig};
pub(crate) use input::EmptyStep;
pub use input::{StepInput, StepWork};
pub use metrics::{Synchronization, TrainingMetrics};
pub use step::TrainStep;
pub(crate) use step::at_call;
use updates::Updates;

pub use crate::{
    ddp::DataParallel,
    loss::Loss,
    strategy::{BufferSync, FullParameters, Strategy},
};
