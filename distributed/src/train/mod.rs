//! Trainers: one training step, on however many ranks.

mod bucketed;
mod buffers;
mod config;
mod loss;
mod metrics;
pub(crate) mod norm;
mod saved;
mod simple;
mod stage;
mod strategy;
mod summed;
mod trainer;

pub(crate) use bucketed::leaves;
pub use bucketed::{BucketedTrainer, DataParallel};
pub use buffers::BufferSync;
pub use config::TrainingConfig;
pub use loss::Loss;
pub use metrics::TrainingMetrics;
pub use saved::Notes;
pub use simple::SimpleTrainer;
pub(crate) use stage::not_of;
pub use stage::{LentSum, StageStrategy};
pub use strategy::Strategy;
pub use summed::Summed;
pub(crate) use summed::{Updates, wide};
pub use trainer::Trainer;
