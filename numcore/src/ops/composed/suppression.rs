//! Greedy non-maximum suppression of boxes.

use crate::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, SortOps, rule},
};

/// Non-maximum suppression, for boxes `[N, 4]` with corners `(x1, y1, x2, y2)` and `scores: [N]`, of floats. From the
/// highest score to the lowest, a box is dropped if its intersection over union with a kept box exceeds `threshold`.
/// The result is the positions of the kept boxes by descending score, `[M]`, `i64`. Boxes with equal scores are taken
/// in their order.
///
/// Each decision depends on earlier ones and is made on the host: the call reads boxes and scores, and waits for the
/// device.
#[doc(alias = "nms")]
#[track_caller]
pub fn non_max_suppression<R: Runtime>(boxes: &Tensor<R>, scores: &Tensor<R>, threshold: f64) -> Result<Tensor<R>> {
    const OP: &str = "nms";
    rule::same_dtype(OP, &[boxes.spec(), scores.spec()])?;
    rule::float(OP, boxes.spec())?;
    let n = scores.shape().numel();
    if scores.shape().rank() != 1 || boxes.dims() != [n, 4] {
        return Err(Error::shape(OP, &[*boxes.shape(), *scores.shape()], "needs boxes [N, 4] and scores [N]"))
            .at_caller();
    }
    if threshold.is_nan() {
        return Err(Error::range(OP, "threshold", threshold, "a number")).at_caller();
    }
    let order = scores.argsort(0, true)?.to_vec::<i64>()?;
    let corners = boxes.to_f64s()?;
    let corner = |i: i64| -> [f64; 4] { std::array::from_fn(|k| corners[4 * i as usize + k]) };
    let mut kept: Vec<(i64, [f64; 4])> = Vec::new();
    for i in order {
        let own = corner(i);
        if !kept.iter().any(|(_, other)| overlap(&own, other) > threshold) {
            kept.push((i, own));
        }
    }
    Tensor::from_vec(boxes.runtime(), kept.into_iter().map(|(i, _)| i).collect())
}

/// The intersection over union of two boxes.
fn overlap(a: &[f64; 4], b: &[f64; 4]) -> f64 {
    let area = |x: &[f64; 4]| (x[2] - x[0]) * (x[3] - x[1]);
    let side = |k: usize| (a[k + 2].min(b[k + 2]) - a[k].max(b[k])).max(0.0);
    let both = side(0) * side(1);
    both / (area(a) + area(b) - both)
}
