//! A gradient bucket, and the parameters in it.

use std::{ops::Range, sync::Arc};

use autograd::Leaf;
use numcore::Runtime;

use super::BucketMember;
use crate::comm::Comm;

/// A parameter, and the place of its gradient: buffer, range in the buffer, and bucket.
pub(crate) struct BucketParam<R: Runtime> {
    pub(crate) leaf: Arc<Leaf<R>>,
    pub(crate) buffer: usize,
    pub(crate) range: usize,
    pub(crate) bucket: usize,
    pub(crate) ready: bool,
    /// True if the parameter has a gradient in this step.
    pub(crate) used: bool,
}

/// A bucket: neighbouring gradients that are sent together.
pub(crate) struct Bucket<R: Runtime> {
    /// A communicator whose calls carry, in errors, the bucket's number and its frozen parameters.
    pub(crate) comm: Comm<R>,
    pub(crate) frozen: Vec<usize>,
    pub(crate) buffer: usize,
    pub(crate) ranges: Range<usize>,
    /// The numbers of the bucket's parameters.
    pub(crate) params: Vec<usize>,
    /// The bucket's parameters with their element ranges in its row.
    pub(crate) members: Vec<BucketMember<R>>,
    pub(crate) waits_for: usize,
    /// True if the reducer holds the bucket's row.
    pub(crate) sent: bool,
}

/// The label of a bucket's collective calls. It names the frozen parameters: ranks that freeze different ones then fail
/// with a mismatch, instead of updating different ones.
pub(crate) fn of_bucket<R: Runtime>(k: usize, frozen: &[usize], params: &[BucketParam<R>]) -> String {
    let names: Vec<String> = frozen.iter().map(|&i| format!("`{}`", params[i].leaf.name())).collect();
    if names.is_empty() { format!("bucket {k}") } else { format!("bucket {k} with {} frozen", names.join(", ")) }
}
