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
        "sum" => |c| one(over(c, c.x(0)?, ReduceOps::sum, ReduceOps::sum_keepdim, ReduceOps::sum_all)),
        "mean" => |c| one(over(c, c.x(0)?, ReduceOps::mean, ReduceOps::mean_keepdim, ReduceOps::mean_all)),
        "prod" => |c| one(over(c, c.x(0)?, ReduceOps::prod, ReduceOps::prod_keepdim, ReduceOps::prod_all)),
        "amax" => |c| one(over(c, c.x(0)?, ReduceOps::amax, ReduceOps::amax_keepdim, ReduceOps::amax_all)),
        "amin" => |c| one(over(c, c.x(0)?, ReduceOps::amin, ReduceOps::amin_keepdim, ReduceOps::amin_all)),
        "logsumexp" => {
            |c| one(over(c, c.x(0)?, ReduceOps::logsumexp, ReduceOps::logsumexp_keepdim, |x| x.logsumexp(&every(x))))
        }
        "any" => |c| one(over(c, c.x(0)?, ReduceOps::any, ReduceOps::any_keepdim, ReduceOps::any_all)),
        "all" => |c| one(over(c, c.x(0)?, ReduceOps::all, ReduceOps::all_keepdim, ReduceOps::all_all)),
        "var" => |c| {
            let correction = correction(c)?;
            let (plain, kept) = (
                |x: &Var<R>, axes: &[isize]| x.var(axes, correction),
                |x: &Var<R>, axes: &[isize]| x.var_keepdim(axes, correction),
            );
            one(over(c, c.x(0)?, plain, kept, |x| x.var_all(correction)))
        },
        "std" => |c| {
            let correction = correction(c)?;
            let (plain, kept) = (
                |x: &Var<R>, axes: &[isize]| x.std(axes, correction),
                |x: &Var<R>, axes: &[isize]| x.std_keepdim(axes, correction),
            );
            one(over(c, c.x(0)?, plain, kept, |x| x.std_all(correction)))
        },
        "norm" => |c| one(norm(c, c.attrs.f64("p", 2.0)?)),
        "cumsum" => |c| one(c.x(0)?.cumsum(axis(c, 0)?)),
        "cumprod" => |c| one(c.x(0)?.cumprod(axis(c, 0)?)),
        "softmax" => |c| one(c.x(0)?.softmax(axis(c, -1)?)),
        "log_softmax" => |c| one(c.x(0)?.log_softmax(axis(c, -1)?)),
        "argmax" => |c| position(c, ReduceOps::argmax, ReduceOps::argmax_keepdim),
        "argmin" => |c| position(c, ReduceOps::argmin, ReduceOps::argmin_keepdim),
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

fn every<R: Runtime>(x: &Var<R>) -> Vec<isize> {
    (0..x.dims().len() as isize).collect()
}

/// A reduction of `x` over the axes that the case names; over all axes if it names none.
fn over<R: Runtime>(
    c: &Call<'_, R>,
    x: &Var<R>,
    plain: impl Fn(&Var<R>, &[isize]) -> Result<Var<R>>,
    kept: impl Fn(&Var<R>, &[isize]) -> Result<Var<R>>,
    all: impl Fn(&Var<R>) -> Result<Var<R>>,
) -> Result<Var<R>> {
    let axes = c.attrs.list(&["dims", "dim", "axis"])?;
    match (axes.is_empty(), c.attrs.bool(&["keepdim"], false)?) {
        (true, true) if !x.dims().is_empty() => kept(x, &every(x)),
        (true, _) => all(x),
        (false, true) => kept(x, &axes),
        (false, false) => plain(x, &axes),
    }
}

fn correction<R: Runtime>(c: &Call<'_, R>) -> Result<usize> {
    let unbiased = c.attrs.bool(&["unbiased"], true)?;
    c.attrs.usize(&["correction"], usize::from(unbiased))
}

/// A position along an axis; without an axis, the position among all elements.
fn position<R: Runtime>(
    c: &Call<'_, R>,
    plain: fn(&Var<R>, isize) -> Result<Var<R>>,
    kept: fn(&Var<R>, isize) -> Result<Var<R>>,
) -> Result<Vec<Var<R>>> {
    let (x, keep) = (c.x(0)?, c.attrs.bool(&["keepdim"], false)?);
    match c.attrs.maybe_isize(&["dim", "axis"])? {
        Some(axis) => one(if keep { kept(x, axis) } else { plain(x, axis) }),
        None => {
            one(plain(&x.reshape([x.spec().shape.numel()])?, 0)?
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

fn norm<R: Runtime>(c: &Call<'_, R>, p: f64) -> Result<Var<R>> {
    let x = c.x(0)?;
    match p {
        2.0 => over(c, x, ReduceOps::norm, ReduceOps::norm_keepdim, ReduceOps::norm_all),
        1.0 => over(c, &x.abs()?, ReduceOps::sum, ReduceOps::sum_keepdim, ReduceOps::sum_all),
        f64::INFINITY => over(c, &x.abs()?, ReduceOps::amax, ReduceOps::amax_keepdim, ReduceOps::amax_all),
        f64::NEG_INFINITY => over(c, &x.abs()?, ReduceOps::amin, ReduceOps::amin_keepdim, ReduceOps::amin_all),
        _ => over(c, &x.abs()?.pow(p)?, ReduceOps::sum, ReduceOps::sum_keepdim, ReduceOps::sum_all)?.pow(1.0 / p),
    }
}
