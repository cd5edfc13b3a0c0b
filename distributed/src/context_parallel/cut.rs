//! The attention of a sequence that is cut over ranks, common to all exchanges of keys and values.

use std::sync::Arc;

use numcore::{
    Result, Runtime, Tensor,
    fused::Attention,
    ops::{Apply, ViewOps, cat},
};

use super::order::ZigZag;
use crate::comm::Comm;

/// The attention of this rank's queries over the keys and values of all ranks.
pub(super) struct CutAttention<R: Runtime> {
    pub(super) comm: Comm<R>,
    pub(super) order: ZigZag,
    /// The attention over the uncut sequence.
    pub(super) op: Attention,
    /// The document of each token of the whole sequence, `[B, T]`.
    pub(super) segments: Option<Tensor<R>>,
    /// The name of the layer, which labels its collective calls.
    pub(super) of: Arc<str>,
}

/// Splits keys, of `depth` channels, from values, concatenated along channels.
pub(super) fn split_keys_values<T: Apply>(both: &T, depth: usize) -> Result<[T; 2]> {
    let width = both.spec().shape[3];
    Ok([both.narrow(3, 0, depth)?, both.narrow(3, depth, width - depth)?])
}

/// Concatenates rows `[B, H, n, D]`, stored token by token, as queries usually are: heads that a view has split, a view
/// merges.
pub(super) fn stacked<T: Apply>(parts: &[T]) -> Result<T> {
    if let [only] = parts {
        return Ok(only.clone());
    }
    let parts = parts.iter().map(|part| part.transpose(1, 2)).collect::<Result<Vec<_>>>()?;
    cat(&parts.iter().collect::<Vec<_>>(), 1)?.transpose(1, 2)
}
