//! Runs of a checked schedule: stages, messages between them, gradients.
//!
//! Each rank makes a [`Pipeline`] of its [`Stage`]s and the same [`Checked`](super::Checked) schedule, and all ranks
//! [`run`](Pipeline::run) it together. A run interprets the rank's row and nothing else. Gradients of a stage and their
//! reduction belong to [`StageHooks`]; in training these are the strategies of the stages.
//!
//! **Invariant**: a run ends on every rank, with a result or with an error that names the rank where it began.

mod batch;
mod boundary;
mod executor;
mod groups;
mod hooks;
mod model;
mod passes;
mod pipeline;
mod split;
mod transfers;

pub use batch::{MicroBatches, PipelineOutput};
pub use groups::PipelineGroups;
pub use hooks::StageHooks;
pub use model::PipelineModel;
pub use nn::Stage;
pub use pipeline::{LossFn, Pipeline, PipelineOptions};
pub use split::{balanced, split};

pub use crate::strategy::Tie;
