//! Trainers: one training step, on however many ranks.

mod bucketed;
mod config;
mod loss;
mod metrics;
mod simple;

pub use bucketed::BucketedTrainer;
pub use config::TrainingConfig;
pub use loss::Loss;
pub use metrics::TrainingMetrics;
pub use simple::SimpleTrainer;
