//! Losses of pairs and triples of examples: distances, rankings, and contrasts within a batch.

use std::sync::LazyLock;

use numcore::{
    DType, Error, Result, Tensor, Within,
    fused::NnOps,
    ops::{Apply, DistanceOps, MatmulOps, PointwiseOps, ViewOps},
    pointwise::Program,
};

use super::{Reduction, by, same_shape};

/// Options of [`triplet`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug)]
pub struct TripletOptions {
    /// The least difference of the distances of the negative and the positive example.
    pub margin: f64,
    /// The order of the norm of differences.
    pub p: f64,
    /// True if the negative example's distance is the smaller one of those to the anchor and the positive one.
    pub swap: bool,
    /// The reduction of the losses.
    pub reduction: Reduction,
}

impl Default for TripletOptions {
    fn default() -> Self {
        TripletOptions { margin: 1.0, p: 2.0, swap: false, reduction: Reduction::Mean }
    }
}

/// The triplet loss of rows `[N, D]` (Schroff et al. 2015): `max(0, d(a, p) − d(a, n) + margin)`.
///
/// Distances are exact where rows coincide; PyTorch adds `1e-6` to every difference.
#[doc(alias = "triplet_margin_loss")]
#[track_caller]
pub fn triplet<T: Apply>(anchor: &T, positive: &T, negative: &T, options: TripletOptions) -> Result<T> {
    static P: LazyLock<Program> =
        LazyLock::new(|| Program::new("triplet", |[near, far], [margin]| [(near - far + margin).max(0.0)]));
    let TripletOptions { margin, p, swap, reduction } = options;
    let shape = same_shape("triplet", anchor, positive)?;
    same_shape("triplet", anchor, negative)?;
    if shape.rank() != 2 {
        return Err(T::explained(Error::shape("triplet", &[shape], "needs rows [N, D]"), &[anchor]));
    }
    let distance = |a: &T, b: &T| a.unsqueeze(1)?.cdist(&b.unsqueeze(1)?, p)?.reshape([shape[0]]);
    let far = distance(anchor, negative)?;
    let far = if swap { far.minimum(&distance(positive, negative)?)? } else { far };
    by(distance(anchor, positive)?.apply_program(&P, &[&far], &[margin.into()])?, reduction)
}

/// The margin ranking loss `max(0, −y (a − b) + margin)`. A target `y` is 1 where `a` ranks higher, −1 where `b` does.
#[track_caller]
pub fn margin_ranking<T: Apply>(a: &T, b: &T, target: &T, margin: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> =
        LazyLock::new(|| Program::new("margin_ranking", |[a, b, y], [margin]| [(-y * (a - b) + margin).max(0.0)]));
    same_shape("margin_ranking", a, b)?;
    same_shape("margin_ranking", a, target)?;
    by(a.apply_program(&P, &[b, target], &[margin.into()])?, reduction)
}

/// The cosine embedding loss of rows `[N, D]` with targets `[N]`. It is `1 − cos` for targets of 1, and
/// `max(0, cos − margin)` for −1.
#[track_caller]
pub fn cosine_embedding<T: Apply>(a: &T, b: &T, target: &T, margin: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("cosine_embedding", |[cos, y], [margin]| [y.gt(0.0).select(1.0 - cos, (cos - margin).max(0.0))])
    });
    let cos = a.cosine_similarity(b, -1)?;
    same_shape("cosine_embedding", &cos, target)?;
    by(cos.apply_program(&P, &[target], &[margin.into()])?, reduction)
}

/// The contrastive loss of a batch (InfoNCE; van den Oord et al. 2018). It is the cross-entropy of the cosine
/// similarities of each query with all keys, over `temperature`. Query `i` of `[N, D]` belongs to key `i`; other keys
/// of the batch are its negatives. For both directions, as CLIP has it, take the mean with queries and keys exchanged.
///
/// # Errors
/// An error unless both are `[N, D]`, and `temperature` is positive.
#[doc(alias("contrastive", "multiple_negatives_ranking"))]
#[track_caller]
pub fn info_nce<T: Apply>(queries: &T, keys: &T, temperature: f64) -> Result<T> {
    let shape = same_shape("info_nce", queries, keys)?;
    if shape.rank() != 2 {
        return Err(T::explained(Error::shape("info_nce", &[shape], "needs rows [N, D]"), &[queries, keys]));
    }
    if temperature.is_nan() || temperature <= 0.0 {
        return Err(Error::range("info_nce", "temperature", temperature, "positive")).at_caller();
    }
    let logits = queries.normalize(-1)?.matmul(&keys.normalize(-1)?.t()?)?.div(temperature)?;
    let own = Tensor::arange(queries.runtime(), 0i64, 1i64, shape[0], DType::I64)?;
    logits.cross_entropy(&T::constant(own))
}
