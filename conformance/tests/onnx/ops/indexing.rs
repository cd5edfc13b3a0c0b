//! Operators that choose and place elements.

use numcore::{
    DType, Tensor,
    ops::{IndexOps, PointwiseOps, ScatterOps, ScatterReduction, SelectOps, SortOps, ViewOps, non_max_suppression},
};

use super::one;
use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "Gather" => gather(c),
        "GatherElements" => {
            let (x, axis) = (c.x(0)?, c.int("axis", 0) as isize);
            one(x.gather(axis, &positive(c.x(1)?, x.dims()[x.shape().axis("GatherElements", axis)?])?))
        }
        "GatherND" => one(c.x(0)?.gather_nd(&c.x(1)?.to_dtype(DType::I64)?, c.int("batch_dims", 0) as usize)),
        "Scatter" | "ScatterElements" => {
            let (x, axis) = (c.x(0)?, c.int("axis", 0) as isize);
            let index = positive(c.x(1)?, x.dims()[x.shape().axis("ScatterElements", axis)?])?;
            one(match reduction(c)? {
                None => x.scatter(axis, &index, c.x(2)?),
                Some(how) => x.scatter_reduce(axis, &index, c.x(2)?, how, true),
            })
        }
        "ScatterND" => {
            let index = c.x(1)?.to_dtype(DType::I64)?;
            one(match reduction(c)? {
                None => c.x(0)?.scatter_nd(&index, c.x(2)?),
                Some(how) => c.x(0)?.scatter_nd_reduce(&index, c.x(2)?, how, true),
            })
        }
        "OneHot" => one_hot(c),
        "NonZero" => one(c.x(0)?.nonzero()?.t()),
        "TopK" => top(c),
        "Unique" => unique(c),
        "Compress" => {
            let x = if c.has("axis") { c.x(0)?.clone() } else { c.x(0)?.reshape([c.x(0)?.shape().numel()])? };
            let axis = c.int("axis", 0) as isize;
            let mask = c.x(1)?;
            let shown = x.narrow(axis, 0, mask.dims()[0].min(x.dims()[x.shape().axis("Compress", axis)?]))?;
            one(shown.compress(mask, axis))
        }
        "ArrayFeatureExtractor" => {
            let x = c.x(0)?;
            one(x.index_select(-1, &c.x(1)?.reshape([c.x(1)?.shape().numel()])?))
        }
        "TensorScatter" => tensor_scatter(c),
        "NonMaxSuppression" => suppression(c),
        _ => Ok(None),
    }
}

/// Indices that count from the end count from the start instead.
fn positive(index: &T, size: usize) -> numcore::Result<T> {
    let index = index.to_dtype(DType::I64)?;
    index.add(size as f64)?.where_cond(&index.lt(0.0)?, &index)
}

fn reduction(c: &Call<'_>) -> Answer<Option<ScatterReduction>> {
    Ok(Some(match c.text("reduction", "none") {
        "none" => return Ok(None),
        "add" => ScatterReduction::Sum,
        "mul" => ScatterReduction::Prod,
        "max" => ScatterReduction::Amax,
        "min" => ScatterReduction::Amin,
        other => return Err(format!("the reduction {other}").into()),
    }))
}

fn gather(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let axis = x.shape().axis("Gather", c.int("axis", 0) as isize)?;
    let index = c.x(1)?;
    let flat = positive(&index.reshape([index.shape().numel()])?, x.dims()[axis])?;
    let dims = [&x.dims()[..axis], index.dims(), &x.dims()[axis + 1..]].concat();
    one(x.index_select(axis as isize, &flat)?.reshape(dims))
}

fn one_hot(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (index, values) = (c.x(0)?.to_dtype(DType::I64)?, c.x(2)?);
    let depth = c.x(1)?.reshape([1])?.to_f64s()?[0] as usize;
    let rank = index.dims().len() as isize + 1;
    let axis = c.int("axis", -1) as isize;
    let axis = if axis < 0 { axis + rank } else { axis };
    let mut along = vec![1; rank as usize];
    along[axis as usize] = depth;
    let classes = Tensor::arange(c.cpu(), 0i64, 1i64, depth, DType::I64)?.reshape(along)?;
    let hot = positive(&index, depth)?.unsqueeze(axis)?.eq(&classes)?;
    one(values.select(0, 1)?.where_cond(&hot, &values.select(0, 0)?))
}

fn top(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (x, axis) = (c.x(0)?, c.int("axis", -1) as isize);
    let k = c.host(1)?.map_or(c.int("k", 1), |k| k[0]) as usize;
    let (values, places) = if c.int("largest", 1) == 1 { x.topk(k, axis)? } else { x.topk_smallest(k, axis)? };
    Ok(Some(vec![values, places]))
}

fn unique(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let axis = c.int("axis", 0) as isize;
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
    Ok(Some(vec![values, first, inverse, counts]))
}

/// Each sequence's update goes to its place in the cache; in a circular one it goes on at the start.
fn tensor_scatter(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (cache, update) = (c.x(0)?, c.x(1)?);
    let axis = cache.shape().axis("TensorScatter", c.int("axis", -2) as isize)?;
    let (most, len) = (cache.dims()[axis], update.dims()[axis]);
    let starts = c.host(2)?.unwrap_or(vec![0; cache.dims()[0]]);
    let mut rows = Vec::new();
    for (b, start) in starts.into_iter().enumerate() {
        let at: Vec<i64> = (0..len as i64).map(|i| (start + i) % most as i64).collect();
        rows.push(cache.narrow(0, b, 1)?.index_copy(axis as isize, &c.integers(&at)?, &update.narrow(0, b, 1)?)?);
    }
    one(numcore::ops::cat(&rows.iter().collect::<Vec<_>>(), 0))
}

fn suppression(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (boxes, scores) = (c.x(0)?, c.x(1)?);
    let most = c.host(2)?.map_or(0, |v| v[0]) as usize;
    let number = |i: usize| c.opt(i).map(|x| x.reshape([1])?.item()).transpose();
    let (overlap, lowest) = (number(3)?.unwrap_or(0.0), number(4)?.unwrap_or(f64::NEG_INFINITY));
    let mut found = Vec::new();
    for batch in 0..scores.dims()[0] {
        let corners = corners(&boxes.select(0, batch)?, c.int("center_point_box", 0) == 1)?;
        for class in 0..scores.dims()[1] {
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
fn corners(boxes: &T, centers: bool) -> numcore::Result<T> {
    let (a, b) = (boxes.narrow(1, 0, 2)?, boxes.narrow(1, 2, 2)?);
    let (a, b) = if centers { (a.sub(&b.div(2.0)?)?, a.add(&b.div(2.0)?)?) } else { (a, b) };
    numcore::ops::cat(&[&a.minimum(&b)?, &a.maximum(&b)?], 1)
}
