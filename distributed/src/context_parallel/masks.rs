//! Masks of parts of a sequence: tokens of one document see none of another, and none far before them.

use nn::parallel::{SequencePart, same_segment};
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{PointwiseOps, ViewOps},
};

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

/// The mask to add to the scores of `queries` with `keys`, `[1, 1, n, m]`, of the dtype of `like`. It is −∞ for keys
/// more than `before` positions before a query.
pub(super) fn window_mask<R: Runtime>(
    before: usize,
    queries: &SequencePart,
    keys: &SequencePart,
    like: &Tensor<R>,
) -> Result<Tensor<R>> {
    let rt = like.runtime();
    let positions =
        |part: &SequencePart| part.take(&Tensor::arange(rt, 0i64, 1i64, part.tokens(), DType::I64)?, 0)?.contiguous();
    let (q, k) = (positions(queries)?, positions(keys)?);
    let far = q.reshape([1, 1, q.shape()[0], 1])?.sub(&k)?.gt(before as f64)?;
    Tensor::zeros(rt, [], like.dtype())?.masked_fill(&far, f64::NEG_INFINITY)
}
