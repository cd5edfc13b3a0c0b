//! Reductions, scans and what is normalized along axes.

use numcore::{
    DType,
    fused::NnOps,
    ops::{IndexOps, PointwiseOps, ReduceOps, ScanOps, ViewOps},
};

use super::one;
use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "ReduceSum" => reduced(c, |x, axes| x.sum_keepdim(axes)),
        "ReduceMean" => reduced(c, |x, axes| x.mean_keepdim(axes)),
        "ReduceProd" => reduced(c, |x, axes| x.prod_keepdim(axes)?.to_dtype(x.dtype())),
        "ReduceMax" => reduced(c, |x, axes| extreme(x, |x| x.amax_keepdim(axes), |x| x.any_keepdim(axes))),
        "ReduceMin" => reduced(c, |x, axes| extreme(x, |x| x.amin_keepdim(axes), |x| x.all_keepdim(axes))),
        "ReduceL1" => reduced(c, |x, axes| x.abs()?.sum_keepdim(axes)),
        "ReduceL2" => reduced(c, |x, axes| x.norm_keepdim(axes)),
        "ReduceSumSquare" => reduced(c, |x, axes| x.square()?.sum_keepdim(axes)),
        "ReduceLogSum" => reduced(c, |x, axes| x.sum_keepdim(axes)?.log()),
        "ReduceLogSumExp" => reduced(c, |x, axes| x.logsumexp_keepdim(axes)),
        "ArgMax" => extreme_index(c, |x, axis| x.argmax_keepdim(axis)),
        "ArgMin" => extreme_index(c, |x, axis| x.argmin_keepdim(axis)),
        "CumSum" => scanned(c, 0.0, |x, axis| x.cumsum(axis)),
        "CumProd" => scanned(c, 1.0, |x, axis| x.cumprod(axis)),
        "Softmax" => along(c, |x, axis| x.softmax(axis)),
        "LogSoftmax" => along(c, |x, axis| x.log_softmax(axis)),
        "Hardmax" => along(c, |x, axis| {
            let axis = x.shape().axis("Hardmax", axis)? as isize;
            let hot = x.argmax(axis)?.one_hot(x.dims()[axis as usize])?;
            let last = hot.dims().len() - 1;
            let mut order: Vec<usize> = (0..last).collect();
            order.insert(axis as usize, last);
            hot.permute_axes(&order)?.to_dtype(x.dtype())
        }),
        "LpNormalization" => {
            let (x, axis) = (c.x(0)?, [c.int("axis", -1) as isize]);
            let norm = if c.int("p", 2) == 1 { x.abs()?.sum_keepdim(&axis)? } else { x.norm_keepdim(&axis)? };
            let safe = norm.masked_fill(&norm.eq(0.0)?, 1.0)?;
            one(x.div(&safe))
        }
        "MeanVarianceNormalization" => {
            let x = c.x(0)?;
            let axes: Vec<isize> = c.ints("axes").unwrap_or(vec![0, 2, 3]).iter().map(|&a| a as isize).collect();
            let centered = x.sub(&x.mean_keepdim(&axes)?)?;
            one(centered.div(&x.std_keepdim(&axes, 0)?.add(1e-9)?))
        }
        _ => Ok(None),
    }
}

/// Booleans are ordered by `any` and `all`.
fn extreme(
    x: &T,
    of_numbers: impl Fn(&T) -> numcore::Result<T>,
    of_booleans: impl Fn(&T) -> numcore::Result<T>,
) -> numcore::Result<T> {
    if x.dtype() == DType::Bool { of_booleans(x) } else { of_numbers(x) }
}

/// A reduction by the method that keeps the axes.
fn reduced(c: &Call<'_>, f: impl Fn(&T, &[isize]) -> numcore::Result<T>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let axes = c.list("axes", 1)?.filter(|axes| !axes.is_empty());
    if axes.is_none() && c.int("noop_with_empty_axes", 0) == 1 {
        // Of each element alone.
        return one(f(&x.unsqueeze(-1)?, &[-1])?.squeeze(-1));
    }
    let all = || (0..x.dims().len() as i64).collect();
    let axes: Vec<isize> = axes.unwrap_or_else(all).iter().map(|&axis| axis as isize).collect();
    let kept = f(x, &axes)?;
    one(if c.int("keepdims", 1) == 1 {
        Ok(kept)
    } else {
        kept.reshape(kept.shape().dropped(x.shape().axes("Reduce", &axes)?))
    })
}

fn extreme_index(c: &Call<'_>, f: fn(&T, isize) -> numcore::Result<T>) -> Answer<Option<Vec<T>>> {
    let (x, axis) = (c.x(0)?, c.int("axis", 0) as isize);
    let kept = if c.int("select_last_index", 0) == 0 {
        f(x, axis)?
    } else {
        let size = x.dims()[x.shape().axis("ArgMax", axis)?];
        f(&x.flip(&[axis])?, axis)?.rsub((size - 1) as f64)?
    };
    one(if c.int("keepdims", 1) == 1 { Ok(kept) } else { kept.squeeze(axis) })
}

/// `start` is the value before the first element.
fn scanned(c: &Call<'_>, start: f64, f: fn(&T, isize) -> numcore::Result<T>) -> Answer<Option<Vec<T>>> {
    let axis = c.host(1)?.and_then(|axis| axis.first().copied()).ok_or("an axis")? as isize;
    let reverse = c.int("reverse", 0) == 1;
    let mut x = c.x(0)?.clone();
    if reverse {
        x = x.flip(&[axis])?;
    }
    x = f(&x, axis)?.to_dtype(x.dtype())?;
    if c.int("exclusive", 0) == 1 {
        let size = x.dims()[x.shape().axis("CumSum", axis)?];
        let shown = x.narrow(axis, 0, size - 1)?;
        let first = x.narrow(axis, 0, 1)?;
        let first = c.scalar(start, x.dtype())?.broadcast_to(first.dims())?;
        x = numcore::ops::cat(&[&first, &shown], axis)?;
    }
    one(if reverse { x.flip(&[axis]) } else { Ok(x) })
}

/// Before version 13 all axes from `axis` on count as one.
fn along(c: &Call<'_>, f: impl Fn(&T, isize) -> numcore::Result<T>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    if c.opset >= 13 {
        return one(f(x, c.int("axis", -1) as isize));
    }
    let axis = x.shape().axis("Softmax", c.int("axis", 1) as isize)?;
    let rows = x.dims()[..axis].iter().product();
    one(f(&x.reshape([rows, x.shape().numel() / rows])?, -1)?.reshape(x.dims()))
}
