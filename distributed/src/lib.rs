//! Distributed training on many ranks: gradient buckets, ZeRO, tensor, context and expert parallelism,
//! pipeline schedules, sharded checkpoints.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod buckets;
pub mod checkpoint;
pub mod combinations;
pub mod compat;
pub mod context_parallel;
pub mod ddp;
mod devices;
pub mod differentiable;
pub mod expert_parallel;
mod hooks;
mod loss;
pub mod mesh;
pub mod pipeline;
pub mod plan;
pub mod sampler;
pub mod strategy;
mod sums;
mod sync_batch_norm;
pub mod tensor_parallel;
pub mod train;
mod unused;
pub mod zero;

pub use ::comm;
pub use devices::RankDevices;
pub use sync_batch_norm::SyncBatchNorm;
