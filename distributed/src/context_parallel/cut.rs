//! What the attention of a sequence that is cut over ranks is made of, whichever way keys and values are exchanged.

use std::sync::Arc;

use numcore::{
    Result, Runtime, Tensor,
    fused::Attention,
    ops::{Apply, ViewOps, cat},
};

use super::order::ZigZag;
use crate::comm::Comm;

/// The attention of the queries here over the keys and values of all ranks.
pub(super) struct CutAttention<R: Runtime> {
    pub(super) comm: Comm<R>,
    pub(super) order: ZigZag,
    /// What queries see, were the sequence whole.
    pub(super) op: Attention,
    /// The document of each token of the whole sequence, `[B, T]`.
    pub(super) segments: Option<Tensor<R>>,
    /// The layer, by which calls are told apart.
    pub(super) of: Arc<str>,
}

/// Keys and values of `depth` channels that lie next to each other.
pub(super) fn apart<T: Apply>(both: &T, depth: usize) -> Result<[T; 2]> {
    let width = both.spec().shape[3];
    Ok([both.narrow(3, 0, depth)?, both.narrow(3, depth, width - depth)?])
}

/// Rows `[B, H, n, D]` one after another, stored token by token, as queries usually are: heads that were split by a view are merged by a view.
pub(super) fn stacked<T: Apply>(parts: &[T]) -> Result<T> {
    if let [only] = parts {
        return Ok(only.clone());
    }
    let parts = parts.iter().map(|part| part.transpose(1, 2)).collect::<Result<Vec<_>>>()?;
    cat(&parts.iter().collect::<Vec<_>>(), 1)?.transpose(1, 2)
}
