//! Gradient buckets: gradients are exchanged while the backward pass goes on, a bucket at a time.

mod bucket;
mod canonical;
mod compression;
mod finite;
mod hook;
mod options;
mod plan;
mod powersgd;
mod weight;

pub use compression::GradCompression;
pub use hook::Buckets;
pub use options::BucketOptions;
pub use plan::{BucketLimits, BucketPlan, BucketSpec};
pub(crate) use powersgd::Compressor;
pub use powersgd::PowerSgd;

pub use crate::unused::Unused;
