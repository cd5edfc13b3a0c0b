//! Gradient buckets: gradients are exchanged while the backward pass goes on, a bucket at a time.

mod all_reduce;
mod bucket;
mod canonical;
mod compression;
mod finite;
mod hook;
mod layout;
mod options;
mod plan;
mod powersgd;
mod reducer;
mod weight;

pub use all_reduce::AllReduce;
pub use canonical::Canonical;
pub use compression::GradCompression;
pub use hook::GradientBuckets;
pub use options::BucketOptions;
pub use plan::{BucketLimits, BucketPlan, BucketSpec};
pub use powersgd::PowerSgd;
pub use reducer::{BucketMember, BucketReducer, FullBucket};
pub(crate) use reducer::{FailedSteps, reducer};

pub use crate::unused::Unused;
