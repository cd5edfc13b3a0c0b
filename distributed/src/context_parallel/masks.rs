//! Masks of packed documents: tokens of one document see none of another.

use nn::parallel::{SequencePart, same_segment};
use numcore::{Result, Runtime, Tensor, ops::PointwiseOps};

/// The mask to add to the scores of `queries` with `keys`, `[B, 1, n, m]`, of the dtype of `like`: 0 within a document,
/// −∞ across documents. `segments`, `[B, T]`, has the document of each token of the whole sequence.
pub(super) fn segment_mask<R: Runtime>(
    segments: &Tensor<R>,
    queries: &SequencePart,
    keys: &SequencePart,
    like: &Tensor<R>,
) -> Result<Tensor<R>> {
    let differs = same_segment(&queries.take(segments, 1)?, &keys.take(segments, 1)?)?.logical_not()?;
    Tensor::zeros(like.runtime(), [], like.dtype())?.masked_fill(&differs, f64::NEG_INFINITY)
}
