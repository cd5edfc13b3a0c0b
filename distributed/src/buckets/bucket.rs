//! A bucket, and the parameters in it.

use std::{ops::Range, sync::Arc};

use autograd::Leaf;
use numcore::Runtime;

use super::BucketMember;
use crate::comm::Comm;

/// A parameter, and where its gradient is stored.
pub(crate) struct BucketParam<R: Runtime> {
    pub(crate) leaf: Arc<Leaf<R>>,
    pub(crate) buffer: usize,
    pub(crate) range: usize,
    pub(crate) bucket: usize,
    pub(crate) ready: bool,
    /// Whether it has a gradient in this step.
    pub(crate) used: bool,
}

/// Neighbouring gradients that are sent together.
pub(crate) struct Bucket<R: Runtime> {
    /// A communicator whose calls say which bucket they are of, and which of its parameters are frozen.
    pub(crate) comm: Comm<R>,
    pub(crate) frozen: Vec<usize>,
    pub(crate) buffer: usize,
    pub(crate) ranges: Range<usize>,
    /// The parameters of the bucket, by number.
    pub(crate) params: Vec<usize>,
    /// The parameters of the bucket, where they are in its row.
    pub(crate) members: Vec<BucketMember<R>>,
    pub(crate) waits_for: usize,
    /// Whether the reducer has its row.
    pub(crate) sent: bool,
}

/// What a bucket's calls are of. Which parameters are frozen is part of it: ranks that freeze different ones disagree, instead of updating
/// different ones.
pub(crate) fn of_bucket<R: Runtime>(k: usize, frozen: &[usize], params: &[BucketParam<R>]) -> String {
    let names: Vec<String> = frozen.iter().map(|&i| format!("`{}`", params[i].leaf.name())).collect();
    if names.is_empty() { format!("bucket {k}") } else { format!("bucket {k} with {} frozen", names.join(", ")) }
}
