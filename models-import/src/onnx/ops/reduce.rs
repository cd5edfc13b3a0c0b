//! Reductions, scans and normalizations along axes.

use autograd::Var;
use numcore::{
    DType, Result, Runtime,
    fused::NnOps,
    ops::{Apply, IndexOps, PointwiseOps, ReduceOps, ScanOps, ViewOps, cat},
};

use super::{
    super::call::{NodeCall, NodeOutputs, bad},
    OperatorRow, one, row,
};

type ReductionOp<R> = fn(&Var<R>, &[isize]) -> Result<Var<R>>;
type AlongAxisOp<R> = fn(&Var<R>, isize) -> Result<Var<R>>;

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    const REDUCE: &[&str] = &["axes", "keepdims", "noop_with_empty_axes"];
    const EXTREME: &[&str] = &["axis", "keepdims", "select_last_index"];
    match op {
        "ReduceSum" => row(REDUCE, |c| reduced(c, |x, axes| x.sum_keepdim(axes))),
        "ReduceMean" => row(REDUCE, |c| reduced(c, |x, axes| x.mean_keepdim(axes))),
        "ReduceProd" => row(REDUCE, |c| reduced(c, |x, axes| x.prod_keepdim(axes))),
        // Booleans are ordered by `any` and `all`.
        "ReduceMax" => row(REDUCE, |c| {
            reduced(c, |x, axes| if x.dtype() == DType::Bool { x.any_keepdim(axes) } else { x.amax_keepdim(axes) })
        }),
        "ReduceMin" => row(REDUCE, |c| {
            reduced(c, |x, axes| if x.dtype() == DType::Bool { x.all_keepdim(axes) } else { x.amin_keepdim(axes) })
        }),
        "ReduceL1" => row(REDUCE, |c| reduced(c, |x, axes| x.abs()?.sum_keepdim(axes))),
        "ReduceL2" => row(REDUCE, |c| reduced(c, |x, axes| x.norm_keepdim(axes))),
        "ReduceSumSquare" => row(REDUCE, |c| reduced(c, |x, axes| x.square()?.sum_keepdim(axes))),
        "ReduceLogSum" => row(REDUCE, |c| reduced(c, |x, axes| x.sum_keepdim(axes)?.log())),
        "ReduceLogSumExp" => row(REDUCE, |c| reduced(c, |x, axes| x.logsumexp_keepdim(axes))),
        "ArgMax" => row(EXTREME, |c| extreme_index(c, |x, axis| x.argmax_keepdim(axis))),
        "ArgMin" => row(EXTREME, |c| extreme_index(c, |x, axis| x.argmin_keepdim(axis))),
        "CumSum" => row(&["exclusive", "reverse"], |c| scanned(c, 0.0, |x, axis| x.cumsum(axis))),
        "CumProd" => row(&["exclusive", "reverse"], |c| scanned(c, 1.0, |x, axis| x.cumprod(axis))),
        "Softmax" => row(&["axis"], |c| along(c, |x, axis| x.softmax(axis))),
        "LogSoftmax" => row(&["axis"], |c| along(c, |x, axis| x.log_softmax(axis))),
        "Hardmax" => row(&["axis"], |c| along(c, hardmax)),
        "LpNormalization" => row(&["axis", "p"], |c| {
            let (x, axis) = (c.x(0)?, [c.int("axis", -1) as isize]);
            let norm = if c.int("p", 2) == 1 { x.abs()?.sum_keepdim(&axis)? } else { x.norm_keepdim(&axis)? };
            one(x.div(&norm.masked_fill(&norm.eq(0.0)?, 1.0)?))
        }),
        "MeanVarianceNormalization" => row(&["axes"], |c| {
            let x = c.x(0)?;
            let axes: Vec<isize> = c.ints("axes").unwrap_or(vec![0, 2, 3]).iter().map(|&a| a as isize).collect();
            let centered = x.sub(&x.mean_keepdim(&axes)?)?;
            one(centered.div(&x.std_keepdim(&axes, 0)?.add(1e-9)?))
        }),
        _ => None,
    }
}

/// A reduction by the method that keeps the axes, in the element type of the input.
fn reduced<R: Runtime>(c: &NodeCall<'_, R>, f: ReductionOp<R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    let axes = c.list("axes", 1)?.filter(|axes| !axes.is_empty());
    let all = || (0..x.dims().len() as i64).collect();
    if (axes.is_none() && c.flag("noop_with_empty_axes")) || x.dims().is_empty() {
        // Of each element alone.
        return one(f(&x.unsqueeze(-1)?, &[-1])?.squeeze(-1)?.to_dtype(x.dtype()));
    }
    let axes: Vec<isize> = axes.unwrap_or_else(all).iter().map(|&axis| axis as isize).collect();
    let kept = f(x, &axes)?.to_dtype(x.dtype())?;
    if c.int("keepdims", 1) == 1 {
        return one(Ok(kept));
    }
    one(kept.reshape(kept.spec().shape.dropped(x.spec().shape.axes("Reduce", &axes)?)))
}

fn extreme_index<R: Runtime>(c: &NodeCall<'_, R>, f: AlongAxisOp<R>) -> NodeOutputs<R> {
    let (x, axis) = (c.x(0)?, c.axis(0, c.int("axis", 0))?);
    let kept = if c.flag("select_last_index") {
        let size = x.dims()[axis];
        f(&x.flip(&[axis as isize])?, axis as isize)?.rsub(size as f64 - 1.0)?
    } else {
        f(x, axis as isize)?
    };
    one(if c.int("keepdims", 1) == 1 { Ok(kept) } else { kept.squeeze(axis as isize) })
}

/// A scan; `start` is the value before the first element.
fn scanned<R: Runtime>(c: &NodeCall<'_, R>, start: f64, f: AlongAxisOp<R>) -> NodeOutputs<R> {
    let axis = c.number(1)?.ok_or_else(|| bad("the axis is missing"))? as i64;
    let axis = c.axis(0, axis)? as isize;
    let reverse = c.flag("reverse");
    let mut x = c.x(0)?.clone();
    if reverse {
        x = x.flip(&[axis])?;
    }
    x = f(&x, axis)?.to_dtype(x.dtype())?;
    let size = x.dims()[axis as usize];
    if c.flag("exclusive") && size > 0 {
        let first = x.narrow(axis, 0, 1)?;
        let first = c.scalar(start, x.dtype())?.broadcast_to(first.dims())?;
        x = cat(&[&first, &x.narrow(axis, 0, size - 1)?], axis)?;
    }
    one(if reverse { x.flip(&[axis]) } else { Ok(x) })
}

/// Before version 13 all axes from `axis` on count as one.
fn along<R: Runtime>(c: &NodeCall<'_, R>, f: AlongAxisOp<R>) -> NodeOutputs<R> {
    let x = c.x(0)?;
    if c.opset() >= 13 {
        return one(f(x, c.int("axis", -1) as isize));
    }
    let axis = c.axis(0, c.int("axis", 1))?;
    let (outer, inner) = (x.dims()[..axis].iter().product::<usize>(), x.dims()[axis..].iter().product::<usize>());
    one(f(&x.reshape([outer, inner])?, -1)?.reshape(x.dims()))
}

fn hardmax<R: Runtime>(x: &Var<R>, axis: isize) -> Result<Var<R>> {
    let axis = x.spec().shape.axis("Hardmax", axis)?;
    let hot = x.argmax(axis as isize)?.one_hot(x.dims()[axis])?;
    let mut order: Vec<usize> = (0..x.dims().len() - 1).collect();
    order.insert(axis, x.dims().len() - 1);
    hot.permute_axes(&order)?.to_dtype(x.dtype())
}
