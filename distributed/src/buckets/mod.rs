//! Gradient buckets: gradients are exchanged while the sweep goes on, a bucket at a time.

mod canonical;
mod hook;
mod plan;
mod powersgd;
mod wire;

pub use hook::{BucketOptions, Buckets};
pub use plan::{BucketLimits, BucketPlan, BucketSpec};
pub use powersgd::PowerSgd;
pub use wire::Wire;

pub use crate::unused::Unused;
