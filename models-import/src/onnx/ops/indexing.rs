//! Operators that choose and place elements.

use autograd::Var;
use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{
        Apply, IndexOps, PointwiseOps, ScatterOps, ScatterReduction, SelectOps, SortOps, ViewOps, cat,
        non_max_suppression,
    },
};

use super::{
    super::call::{NodeCall, NodeOutputs, array, bad, size},
    OperatorRow, one, row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "Gather" => row(&["axis"], gather),
        "GatherElements" => row(&["axis"], |c| {
            let (x, axis) = (c.x(0)?, c.axis(0, c.int("axis", 0))?);
            one(x.gather(axis as isize, &positive(c.x(1)?, x.dims()[axis])?))
        }),
        "GatherND" => {
            row(&["batch_dims"], |c| one(c.x(0)?.gather_nd(&c.x(1)?.to_dtype(DType::I64)?, c.size("batch_dims", 0)?)))
        }
        "Scatter" | "ScatterElements" => row(&["axis", "reduction"], |c| {
            let (x, axis) = (c.x(0)?, c.axis(0, c.int("axis", 0))?);
            let index = positive(c.x(1)?, x.dims()[axis])?;
            one(match reduction(c)? {
                None => x.scatter(axis as isize, &index, c.x(2)?),
                Some(how) => x.scatter_reduce(axis as isize, &index, c.x(2)?, how, true),
            })
        }),
        "ScatterND" => row(&["reduction"], |c| {
            let index = c.x(1)?.to_dtype(DType::I64)?;
            one(match reduction(c)? {
                None => c.x(0)?.scatter_nd(&index, c.x(2)?),
                Some(how) => c.x(0)?.scatter_nd_reduce(&index, c.x(2)?, how, true),
            })
        }),
        "OneHot" => row(&["axis"], one_hot),
        "NonZero" => row(&[], |c| one(Ok(Var::new(c.x(0)?.value()?.nonzero()?.t()?)))),
        "TopK" => row(&["axis", "k", "largest", "sorted"], |c| {
            let (x, axis) = (c.x(0)?, c.int("axis", -1) as isize);
            let k = size(c.number(1)?.map_or(c.int("k", 1), |k| k as i64))?;
            let (values, places) = if c.int("largest", 1) == 1 { x.topk(k, axis)? } else { x.topk_smallest(k, axis)? };
            Ok(vec![values, places])
        }),
        "Unique" => row(&["axis", "sorted"], unique),
        "Compress" => row(&["axis"], |c| {
            let x = if c.has("axis") { c.x(0)?.clone() } else { flat(c.x(0)?)? };
            let axis = x.spec().shape.axis("Compress", c.int("axis", 0) as isize)?;
            let mask = c.x(1)?;
            let [len] = array("the condition's shape", &mask.dims())?;
            let shown = x.narrow(axis as isize, 0, len.min(x.dims()[axis]))?;
            let mask = mask.narrow(0, 0, len.min(x.dims()[axis]))?;
            let kept = mask.value()?.nonzero()?.squeeze(-1)?;
            one(shown.index_select(axis as isize, &Var::new(kept)))
        }),
        "TensorScatter" => row(&["axis", "mode"], tensor_scatter),
        "NonMaxSuppression" => row(&["center_point_box"], suppression),
        _ => None,
    }
}

/// The operators of the domain `ai.onnx.ml`.
pub(super) fn find_ml<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "ArrayFeatureExtractor" => row(&[], |c| one(c.x(0)?.index_select(-1, &flat(c.x(1)?)?))),
        _ => None,
    }
}

/// All elements along one axis.
pub(super) fn flat<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    x.reshape([x.spec().shape.numel()])
}

/// Indices that count from the end count from the start instead.
fn positive<R: Runtime>(index: &Var<R>, size: usize) -> Result<Var<R>> {
    let index = index.to_dtype(DType::I64)?;
    index.add(size as f64)?.where_cond(&index.lt(0.0)?, &index)
}

fn reduction<R: Runtime>(c: &NodeCall<'_, R>) -> Result<Option<ScatterReduction>> {
    Ok(Some(match c.text("reduction", "none") {
        "none" => return Ok(None),
        "add" => ScatterReduction::Sum,
        "mul" => ScatterReduction::Prod,
        "max" => ScatterReduction::Amax,
        "min" => ScatterReduction::Amin,
        other => return Err(bad(format!("has the unknown reduction `{other}`"))),
    }))
}

fn gather<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, axis, index) = (c.x(0)?, c.axis(0, c.int("axis", 0))?, c.x(1)?);
    let dims = x.dims();
    let picked = x.index_select(axis as isize, &positive(&flat(index)?, dims[axis])?)?;
    one(picked.reshape([&dims[..axis], &index.dims(), &dims[axis + 1..]].concat()))
}

fn one_hot<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (index, values) = (c.x(0)?.to_dtype(DType::I64)?, c.x(2)?);
    let depth = size(c.number(1)?.ok_or_else(|| bad("the depth is missing"))? as i64)?;
    let rank = index.dims().len() as i64 + 1;
    let axis = c.int("axis", -1);
    if !(-rank..rank).contains(&axis) {
        return Err(bad(format!("axis {axis} of a value with {rank} axes")));
    }
    let axis = if axis < 0 { axis + rank } else { axis } as usize;
    let mut along = vec![1; rank as usize];
    along[axis] = depth;
    let classes = Tensor::arange(c.device(), 0i64, 1i64, depth, DType::I64)?.reshape(along)?;
    let hot = positive(&index, depth)?.unsqueeze(axis as isize)?.eq(&Var::new(classes))?;
    one(values.select(0, 1)?.where_cond(&hot, &values.select(0, 0)?))
}

fn unique<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, axis) = (c.x(0)?.value()?, c.int("axis", 0) as isize);
    let found = if c.has("axis") { x.unique_along(axis)? } else { x.unique()? };
    let mut inverse = found.inverse.reshape([found.inverse.shape().numel()])?;
    let (mut values, mut first, mut counts) = (found.values, found.first, found.counts);
    if c.int("sorted", 1) == 0 {
        // In the order of their first positions.
        let order = first.argsort(0, false)?;
        values = values.index_select(if c.has("axis") { axis } else { 0 }, &order)?;
        first = first.index_select(0, &order)?;
        counts = counts.index_select(0, &order)?;
        inverse = order.argsort(0, false)?.index_select(0, &inverse)?;
    }
    Ok([values, first, inverse, counts].map(Var::new).into())
}

/// Each sequence's update goes to its place in the cache; in a circular one it goes on at the start.
fn tensor_scatter<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (cache, update, axis) = (c.x(0)?, c.x(1)?, c.axis(0, c.int("axis", -2))?);
    let (dims, updated) = (cache.dims(), update.dims());
    if updated.len() != dims.len() || dims[axis] == 0 {
        return Err(bad(format!("an update of {updated:?} for a cache of {dims:?}")));
    }
    let starts = c.host(2)?.unwrap_or(vec![0; dims[0]]);
    let mut rows = Vec::new();
    for (b, start) in starts.into_iter().enumerate() {
        let start = size(start)?;
        let at: Vec<i64> = (0..updated[axis]).map(|i| ((start + i) % dims[axis]) as i64).collect();
        rows.push(cache.narrow(0, b, 1)?.index_copy(axis as isize, &c.integers(&at)?, &update.narrow(0, b, 1)?)?);
    }
    one(cat(&rows.iter().collect::<Vec<_>>(), 0))
}

fn suppression<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (boxes, scores) = (c.x(0)?.value()?, c.x(1)?.value()?);
    let count = boxes.dims().get(1).copied().unwrap_or(0);
    // Exporters write the largest integer for all boxes.
    let most = size((c.number(2)?.unwrap_or(0.0) as i64).min(count as i64))?;
    let (overlap, lowest) = (c.number(3)?.unwrap_or(0.0), c.number(4)?.unwrap_or(f64::NEG_INFINITY));
    let [batches, classes, _] = array("the scores' shape", scores.dims())?;
    let mut found = Vec::new();
    for batch in 0..batches {
        let corners = corners(&boxes.select(0, batch)?, c.int("center_point_box", 0) == 1)?;
        for class in 0..classes {
            let scores = scores.select(0, batch)?.select(0, class)?;
            let enough = scores.gt(lowest)?.nonzero()?.squeeze(-1)?;
            if enough.dims()[0] == 0 {
                continue;
            }
            let kept =
                non_max_suppression(&corners.index_select(0, &enough)?, &scores.index_select(0, &enough)?, overlap)?;
            let kept = enough.index_select(0, &kept.narrow(0, 0, most.min(kept.dims()[0]))?)?;
            for at in kept.to_vec::<i64>()? {
                found.extend([batch as i64, class as i64, at]);
            }
        }
    }
    one(c.integers(&found)?.reshape([found.len() / 3, 3]))
}

/// The smaller corner and the larger one, of corners in any order, or of centers and sizes.
fn corners<R: Runtime>(boxes: &Tensor<R>, centers: bool) -> Result<Tensor<R>> {
    let (a, b) = (boxes.narrow(1, 0, 2)?, boxes.narrow(1, 2, 2)?);
    let (a, b) = if centers { (a.sub(&b.div(2.0)?)?, a.add(&b.div(2.0)?)?) } else { (a, b) };
    cat(&[&a.minimum(&b)?, &a.maximum(&b)?], 1)
}
