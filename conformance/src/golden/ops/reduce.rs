//! Reductions, order and recurrences along an axis.

use autograd::Var;
use numcore::{
    Result, Runtime,
    fused::NnOps,
    ops::{Apply, PointwiseOps, ReduceOps, ScanOps, SortOps, ViewOps},
};

use crate::golden::call::{Call, OpFn, one};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OpFn<R>> {
    let row: OpFn<R> = match op {
        "sum" => |c| over(c, |x, axes, keep| x.sum(axes, keep)),
        "mean" => |c| over(c, |x, axes, keep| x.mean(axes, keep)),
        "prod" => |c| over(c, |x, axes, keep| x.prod(axes, keep)),
        "amax" => |c| over(c, |x, axes, keep| x.amax(axes, keep)),
        "amin" => |c| over(c, |x, axes, keep| x.amin(axes, keep)),
        "logsumexp" => |c| over(c, |x, axes, keep| x.logsumexp(axes, keep)),
        "any" => |c| over(c, |x, axes, keep| x.any(axes, keep)),
        "all" => |c| over(c, |x, axes, keep| x.all(axes, keep)),
        "var" => |c| {
            let correction = correction(c)?;
            over(c, |x, axes, keep| x.var(axes, correction, keep))
        },
        "std" => |c| {
            let correction = correction(c)?;
            over(c, |x, axes, keep| x.std(axes, correction, keep))
        },
        "norm" => |c| {
            let p = c.attrs.f64("p", 2.0)?;
            over(c, |x, axes, keep| norm(x, p, axes, keep))
        },
        "cumsum" => |c| one(c.x(0)?.cumsum(axis(c, 0)?)),
        "cumprod" => |c| one(c.x(0)?.cumprod(axis(c, 0)?)),
        "softmax" => |c| one(c.x(0)?.softmax(axis(c, -1)?)),
        "log_softmax" => |c| one(c.x(0)?.log_softmax(axis(c, -1)?)),
        "argmax" => |c| position(c, |x, axis, keep| x.argmax(axis, keep)),
        "argmin" => |c| position(c, |x, axis, keep| x.argmin(axis, keep)),
        "sort" => |c| {
            let (values, index) = c.x(0)?.sort(axis(c, -1)?, c.attrs.bool(&["descending"], false)?)?;
            Ok(vec![values, index])
        },
        "argsort" => |c| one(c.x(0)?.argsort(axis(c, -1)?, c.attrs.bool(&["descending"], false)?)),
        "topk" => topk,
        _ => return None,
    };
    Some(row)
}

fn axis<R: Runtime>(c: &Call<'_, R>, default: isize) -> Result<isize> {
    c.attrs.isize(&["dim", "axis"], default)
}

/// A reduction over the axes that the case names; over all axes if it names none.
fn over<R: Runtime>(c: &Call<'_, R>, f: impl Fn(&Var<R>, &[isize], bool) -> Result<Var<R>>) -> Result<Vec<Var<R>>> {
    let axes = c.attrs.list(&["dims", "dim", "axis"])?;
    one(f(c.x(0)?, &axes, c.attrs.bool(&["keepdim"], false)?))
}

fn correction<R: Runtime>(c: &Call<'_, R>) -> Result<usize> {
    let unbiased = c.attrs.bool(&["unbiased"], true)?;
    c.attrs.usize(&["correction"], usize::from(unbiased))
}

/// A position along an axis; without an axis, the position among all elements.
fn position<R: Runtime>(c: &Call<'_, R>, f: impl Fn(&Var<R>, isize, bool) -> Result<Var<R>>) -> Result<Vec<Var<R>>> {
    let (x, keep) = (c.x(0)?, c.attrs.bool(&["keepdim"], false)?);
    match c.attrs.maybe_isize(&["dim", "axis"])? {
        Some(axis) => one(f(x, axis, keep)),
        None => {
            one(f(&x.reshape([x.spec().shape.numel()])?, 0, false)?
                .reshape(vec![1; if keep { x.dims().len() } else { 0 }]))
        }
    }
}

fn topk<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let (x, k, axis) = (c.x(0)?, c.attrs.need(&["k"])?, axis(c, -1)?);
    let largest = c.attrs.bool(&["largest"], true)?;
    let (values, index) = if largest { x.topk(k, axis)? } else { x.topk_smallest(k, axis)? };
    Ok(vec![values, index])
}

fn norm<R: Runtime>(x: &Var<R>, p: f64, axes: &[isize], keep: bool) -> Result<Var<R>> {
    match p {
        2.0 => x.norm(axes, keep),
        1.0 => x.abs()?.sum(axes, keep),
        f64::INFINITY => x.abs()?.amax(axes, keep),
        f64::NEG_INFINITY => x.abs()?.amin(axes, keep),
        _ => x.abs()?.pow(p)?.sum(axes, keep)?.pow(1.0 / p),
    }
}
