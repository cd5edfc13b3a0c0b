//! Data parallelism: every rank has the whole model, and gradients are summed over ranks.

pub(crate) mod by_hand;
mod checkpoint;
mod data_parallel;
mod exchange;
mod partial;
mod unfreeze;

pub use data_parallel::DataParallel;
pub(crate) use data_parallel::ReducerSource;
pub(crate) use unfreeze::UNFROZEN;
