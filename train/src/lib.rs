//! The layer above the training step: a loop with evaluation, checkpoints and exact resuming, and what people look at while it
//! runs.
#![forbid(unsafe_code)]

mod escape;
mod json;
pub mod metrics;
pub mod recorder;
pub mod report;
pub mod sink;
