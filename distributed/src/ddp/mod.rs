//! Data parallelism: every rank has the whole model, and gradients are summed over ranks.

mod by_hand;
mod checkpoint;
mod data_parallel;
mod stage_strategy;
mod thaw;

pub use by_hand::Ddp;
pub(crate) use by_hand::described;
pub use data_parallel::{BucketedTrainer, DataParallel, SimpleTrainer};
pub(crate) use data_parallel::{MakeReducer, leaves};
pub(crate) use thaw::THAWED;
