//! Gradient buckets: gradients are summed over ranks a bucket at a time, while the backward pass goes on.

mod all_reduce;
mod bucket;
mod canonical;
mod compression;
mod finite;
mod layout;
mod options;
mod plan;
mod reducer;
mod weight;

pub use all_reduce::AllReduce;
pub use canonical::Canonical;
pub use compression::GradCompression;
pub(crate) use finite::is_finite;
pub(crate) use layout::BucketLayout;
pub use options::BucketOptions;
pub use plan::{BucketLimits, BucketPlan, BucketSpec};
pub(crate) use reducer::reducer;
pub use reducer::{BucketMember, BucketReducer, FullBucket};
pub use weight::TotalWeight;

pub use crate::unused::Unused;
