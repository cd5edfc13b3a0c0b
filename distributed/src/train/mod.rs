//! Training steps: forward and backward passes of some micro-batches, and the update, on however many ranks.
//!
//! [`TrainStep::builder`] makes every kind of them.

mod buffers;
mod builder;
mod checkpoint;
mod config;
mod loss;
mod metrics;
pub(crate) mod norm;
mod observer;
mod pipeline_builder;
mod push;
mod reduced_gradients;
mod stage_strategy;
mod step;
mod strategy;

pub use buffers::BufferSync;
pub(crate) use builder::StepParts;
pub use builder::{NoOptimizer, TrainStepBuilder, WithExperts};
pub use checkpoint::CheckpointNotes;
pub use config::{HyperParameters, TrainingConfig};
pub use loss::Loss;
pub use metrics::TrainingMetrics;
pub(crate) use observer::{CountedHook, GradientObserver, observe};
pub use reduced_gradients::ReducedGradients;
pub(crate) use reduced_gradients::{Updates, share_groups, wide};
pub(crate) use stage_strategy::not_of;
pub use stage_strategy::{GradLoan, StageStrategy};
pub use step::TrainStep;
pub(crate) use step::{NO_ROW, at_call};
pub use strategy::Strategy;

pub use crate::{
    ddp::{BucketedTrainer, DataParallel, SimpleTrainer},
    expert_parallel::{ExpertTrainer, ZeroExpertTrainer},
    pipeline::{ExpertPipelineTrainer, PipelineTrainer, ZeroExpertPipelineTrainer, ZeroPipelineTrainer},
    zero::{ZeroStage1, ZeroStage2, ZeroStage3, ZeroTrainer},
};
