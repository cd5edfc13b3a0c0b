//! Trainers: one training step, on however many ranks.

mod bucketed;
mod buffers;
mod checkpoint;
mod config;
mod loss;
mod metrics;
pub(crate) mod norm;
mod reduced_gradients;
mod simple;
mod stage_strategy;
mod strategy;
mod trainer;

pub(crate) use bucketed::leaves;
pub use bucketed::{BucketedTrainer, DataParallel};
pub use buffers::BufferSync;
pub use checkpoint::CheckpointNotes;
pub use config::TrainingConfig;
pub use loss::Loss;
pub use metrics::TrainingMetrics;
pub use reduced_gradients::ReducedGradients;
pub(crate) use reduced_gradients::{Updates, wide};
pub use simple::SimpleTrainer;
pub(crate) use stage_strategy::not_of;
pub use stage_strategy::{GradLoan, StageStrategy};
pub use strategy::Strategy;
pub use trainer::Trainer;
