//! A bucket, and the parameters in it.

use std::{ops::Range, sync::Arc};

use autograd::Leaf;
use numcore::Runtime;

use super::BucketMember;
use crate::comm::Comm;

/// A parameter, and where its gradient is stored.
pub(super) struct BucketParam<R: Runtime> {
    pub(super) leaf: Arc<Leaf<R>>,
    pub(super) buffer: usize,
    pub(super) range: usize,
    pub(super) bucket: usize,
    pub(super) ready: bool,
    /// Whether it has a gradient in this step.
    pub(super) used: bool,
}

/// Neighbouring gradients that are sent together.
pub(super) struct Bucket<R: Runtime> {
    /// A communicator whose calls say which bucket they are of, and which of its parameters are frozen.
    pub(super) comm: Comm<R>,
    pub(super) frozen: Vec<usize>,
    pub(super) buffer: usize,
    pub(super) ranges: Range<usize>,
    /// The parameters of the bucket, by number.
    pub(super) params: Vec<usize>,
    /// The parameters of the bucket, where they are in its row.
    pub(super) members: Vec<BucketMember<R>>,
    pub(super) waits_for: usize,
    /// Whether the reducer has its row.
    pub(super) sent: bool,
}

/// What a bucket's calls are of. Which parameters are frozen is part of it: ranks that freeze different ones disagree, instead of updating
/// different ones.
pub(super) fn of_bucket<R: Runtime>(k: usize, frozen: &[usize], params: &[BucketParam<R>]) -> String {
    let names: Vec<String> = frozen.iter().map(|&i| format!("`{}`", params[i].leaf.name())).collect();
    if names.is_empty() { format!("bucket {k}") } else { format!("bucket {k} with {} frozen", names.join(", ")) }
}
