//! Many ranks, one training run: communicators, gradient buckets, ZeRO, pipeline schedules, sharded checkpoints.
#![forbid(unsafe_code)]

pub mod comm;
pub mod pipeline;
