//! Running a checked schedule: stages, messages between them, gradients.
//!
//! Each rank builds a [`Pipeline`] of its [`Stage`]s and the same [`Checked`](super::Checked) schedule, and all [`run`](Pipeline::run) it together. A run
//! interprets the rank's row and nothing else; what belongs to a stage as a whole, its gradients and their reduction, it leaves to
//! [`StageHooks`]; in training those are the strategies of the stages.
//!
//! **Invariant**: a run ends on every rank, with a result or with an error that names the rank it began on.

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
