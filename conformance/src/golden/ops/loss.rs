//! Losses of the op tables.

use autograd::Var;
use nn::loss;
use numcore::{
    Error, Result, Runtime,
    fused::{CrossEntropyOptions, LinearCrossEntropy, Reduction},
    ops::{Apply, Bits, PointwiseOps, ViewOps},
};

use crate::golden::call::{Call, OpFn, one};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OpFn<R>> {
    let row: OpFn<R> = match op {
        "cross_entropy" => cross_entropy,
        "linear_cross_entropy" => linear_cross_entropy,
        "nll" | "nll_loss" => nll,
        "mse" | "mse_loss" => |c| elementwise(c, "mean", loss::mse),
        "l1" | "l1_loss" => |c| elementwise(c, "mean", loss::l1),
        "smooth_l1" | "smooth_l1_loss" => |c| {
            let beta = c.attrs.f64("beta", 1.0)?;
            elementwise(c, "mean", |x, y, how| loss::smooth_l1(x, y, beta, how))
        },
        "huber" | "huber_loss" => |c| {
            let delta = c.attrs.f64("delta", 1.0)?;
            elementwise(c, "mean", |x, y, how| loss::huber(x, y, delta, how))
        },
        "bce" | "binary_cross_entropy" => |c| elementwise(c, "mean", loss::bce),
        "bce_with_logits" => |c| elementwise(c, "mean", loss::bce_with_logits),
        // The divergence of distributions by the default of this group of losses; PyTorch's own default is the mean
        // over elements.
        "kl_div" => |c| {
            let log_target = c.attrs.bool(&["log_target"], false)?;
            elementwise(c, "batchmean", |x, y, how| {
                if log_target { loss::kl_div(x, &y.exp()?, how) } else { loss::kl_div(x, y, how) }
            })
        },
        _ => return None,
    };
    Some(row)
}

/// The reduction of the losses of all elements; `None` for a sum divided by the first axis' size.
fn reduction<R: Runtime>(c: &Call<'_, R>, default: &'static str) -> Result<Option<Reduction>> {
    match c.attrs.str("reduction", default)? {
        "mean" => Ok(Some(Reduction::Mean)),
        "sum" => Ok(Some(Reduction::Sum)),
        "none" => Ok(Some(Reduction::None)),
        "batchmean" => Ok(None),
        other => Err(Error::format("golden", format!("`{other}` is not a reduction"))),
    }
}

fn elementwise<R: Runtime>(
    c: &Call<'_, R>,
    default: &'static str,
    loss: impl Fn(&Var<R>, &Var<R>, Reduction) -> Result<Var<R>>,
) -> Result<Vec<Var<R>>> {
    let (x, y) = (c.x(0)?, c.x(1)?);
    match reduction(c, default)? {
        Some(how) => one(loss(x, y, how)),
        None => one(loss(x, y, Reduction::Sum)?.div(x.dims().first().copied().unwrap_or(1) as f64)),
    }
}

/// Moves the classes, which PyTorch has on the second axis, to the last.
fn classes_last<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    let mut order: Vec<isize> = (0..x.dims().len() as isize).collect();
    if order.len() > 2 {
        order[1..].rotate_left(1);
    }
    x.permute(&order)
}

fn row_reduction<R: Runtime>(c: &Call<'_, R>) -> Result<Reduction> {
    reduction(c, "mean")?.ok_or_else(|| Error::format("golden", "`batchmean` is not a reduction of rows"))
}

fn cross_entropy_options<R: Runtime>(c: &Call<'_, R>) -> Result<CrossEntropyOptions> {
    Ok(CrossEntropyOptions {
        ignore_index: c.attrs.isize(&["ignore_index"], -100)? as i64,
        label_smoothing: c.attrs.f64("label_smoothing", 0.0)?,
        reduction: row_reduction(c)?,
    })
}

fn cross_entropy<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let options = cross_entropy_options(c)?;
    let (x, target) = (classes_last(c.x(0)?)?, c.x(1)?);
    one(match c.maybe(2) {
        Some(weight) => loss::weighted_cross_entropy(&x, target, weight, options),
        None => loss::cross_entropy_with(&x, target, options),
    })
}

/// Computes linear cross-entropy a chunk of rows at a time: a sum, or the losses themselves. The inputs are
/// `x: [.., C]`, a weight, a bias if there are four inputs, and classes.
fn linear_cross_entropy<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let options = cross_entropy_options(c)?;
    let (x, weight, bias) = (c.x(0)?, c.x(1)?, c.maybe(3).and(c.maybe(2)));
    let target = c.x(if bias.is_some() { 3 } else { 2 })?;
    let chunk = c.attrs.usize(&["chunk"], 1)?;
    if options.reduction == Reduction::Mean {
        return one(loss::linear_cross_entropy_with(x, weight, bias, target, options));
    }
    let op = LinearCrossEntropy {
        ignore_index: options.ignore_index,
        label_smoothing: options.label_smoothing,
        bias: bias.is_some(),
        summed: options.reduction == Reduction::Sum,
        chunk: Some(chunk),
        gradients: Bits::NONE,
    };
    let rows = target.dims().iter().product();
    let features = weight.dims()[1];
    let (x, classes) = (x.reshape([rows, features])?, target.reshape([rows])?);
    let ins: Vec<&Var<R>> = [&x, weight].into_iter().chain(bias).chain([&classes]).collect();
    let losses = Var::apply1(op, &ins)?;
    one(if options.reduction == Reduction::Sum { Ok(losses) } else { losses.reshape(target.dims()) })
}

fn nll<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let ignore_index = c.attrs.isize(&["ignore_index"], -100)? as i64;
    let options = loss::NllOptions { ignore_index, reduction: row_reduction(c)? };
    let (x, target) = (classes_last(c.x(0)?)?, c.x(1)?);
    one(match c.maybe(2) {
        Some(weight) => loss::weighted_nll(&x, target, weight, options),
        None => loss::nll(&x, target, options),
    })
}
