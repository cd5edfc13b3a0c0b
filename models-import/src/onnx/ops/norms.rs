//! Normalizations, dropout.

use autograd::{Var, next_seed, no_grad};
use nn::counted_rows;
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::NnOps,
    ops::{Apply, PadMode, PadOps, PointwiseOps, ReduceOps, RepeatOps, ViewOps, cat},
};

use super::{
    super::call::{NodeCall, NodeOutputs, bad},
    OperatorRow, one, row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "LayerNormalization" => row(&["axis", "epsilon", "stash_type"], layer),
        "RMSNormalization" => row(&["axis", "epsilon", "stash_type"], |c| {
            let (rows, weight) = (rows(c)?, flat(c, 1)?);
            one(rows.rms_norm(weight.as_ref(), c.float("epsilon", 1e-5))?.reshape(c.x(0)?.dims()))
        }),
        "BatchNormalization" => row(&["epsilon", "momentum", "training_mode", "spatial"], batch),
        "InstanceNormalization" => row(&["epsilon"], |c| {
            let x = c.x(0)?;
            let channels = x.dims().get(1).copied().unwrap_or(0);
            one(x.group_norm(channels, c.opt(1)?, c.opt(2)?, c.float("epsilon", 1e-5)))
        }),
        "GroupNormalization" => row(&["epsilon", "num_groups", "stash_type"], |c| {
            let (x, groups) = (c.x(0)?, c.size("num_groups", 1)?);
            // Before version 21 scales and biases are those of groups.
            let each = x.dims().get(1).copied().unwrap_or(0) / groups.max(1);
            let of_channels = |w: &Var<R>| if c.opset() < 21 { w.repeat_interleave(each, 0) } else { Ok(w.clone()) };
            let (weight, bias) = (c.opt(1)?.map(of_channels).transpose()?, c.opt(2)?.map(of_channels).transpose()?);
            one(x.group_norm(groups, weight.as_ref(), bias.as_ref(), c.float("epsilon", 1e-5)))
        }),
        "LRN" => row(&["alpha", "beta", "bias", "size"], across),
        "Dropout" => row(&["ratio", "seed"], dropout),
        _ => None,
    }
}

/// The input with all axes from `axis` on as one.
fn rows<R: Runtime>(c: &NodeCall<'_, R>) -> Result<Var<R>> {
    let (x, axis) = (c.x(0)?, c.axis(0, c.int("axis", -1))?);
    let (outer, inner) = (x.dims()[..axis].iter().product::<usize>(), x.dims()[axis..].iter().product::<usize>());
    x.reshape([outer, inner])
}

/// The weight or bias that is input `i`, for the axes from `axis` on.
fn flat<R: Runtime>(c: &NodeCall<'_, R>, i: usize) -> Result<Option<Var<R>>> {
    let (dims, axis) = (c.x(0)?.dims(), c.axis(0, c.int("axis", -1))?);
    let inner = dims[axis..].iter().product::<usize>();
    c.opt(i)?.map(|w| w.broadcast_to(&dims[axis..])?.reshape([inner])).transpose()
}

fn layer<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, rows, eps) = (c.x(0)?, rows(c)?, c.float("epsilon", 1e-5));
    let y = rows.layer_norm(flat(c, 1)?.as_ref(), flat(c, 2)?.as_ref(), eps)?.reshape(x.dims())?;
    if c.outputs() == 1 {
        return one(Ok(y));
    }
    let axes: Vec<isize> = (c.axis(0, c.int("axis", -1))? as isize..x.dims().len() as isize).collect();
    let wide = x.to_dtype(DType::F32)?;
    let deviation = wide.var_keepdim(&axes, 0)?.add(eps)?.rsqrt()?;
    Ok(vec![y, wide.mean_keepdim(&axes)?, deviation])
}

/// Batch norm by the running statistics in evaluation, and by the batch's in training, which move the running ones.
/// Rows that do not [count](nn::counted_rows) are no part of the batch's statistics, and have the running ones.
///
/// Outputs are `y`, the running statistics, and, before version 14, the statistics that `y` was computed by.
fn batch<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, eps) = (c.x(0)?, c.float("epsilon", 1e-5));
    if c.int("spatial", 1) != 1 {
        return Err(bad("statistics of each position are not supported: `spatial` must be 1"));
    }
    let (mean, variance, weight, bias) = (c.x(3)?, c.x(4)?, Some(c.x(1)?), Some(c.x(2)?));
    let rows = x.dims().first().copied().unwrap_or(0);
    let counted = if c.is_training() { counted_rows(rows) } else { 0 };
    let by_running = |x: &Var<R>| x.batch_norm(mean, variance, weight, bias, eps);
    let shape = x.spec().shape;
    let count = shape.dims().iter().skip(2).product::<usize>() * counted;
    if counted == 0 || (count < 2 && counted < rows) {
        return Ok(vec![by_running(x)?, mean.clone(), variance.clone(), mean.clone(), variance.clone()]);
    }
    if count < 2 {
        let why = "one value per channel has no variance to train with; give it a larger batch, or call `eval`";
        return Err(bad(why));
    }
    let (mut y, new_mean, new_variance) = x.narrow(0, 0, counted)?.batch_norm_train(weight, bias, eps)?;
    if counted < rows {
        y = cat(&[&y, &by_running(&x.narrow(0, counted, rows - counted)?)?], 0)?;
    }
    // The format's running variance is that of the batch itself, which divides by the count.
    let new_variance = new_variance.mul((count - 1) as f64 / count as f64)?;
    let kept = c.float("momentum", 0.9);
    let moved = |i: usize, old: &Var<R>, new: &Var<R>| -> Result<Var<R>> {
        let moved = no_grad(|| old.mul(kept)?.add(&new.mul(1.0 - kept)?.to_dtype(old.dtype())?))?;
        if let Some(buffer) = c.buffer(i) {
            buffer.set(moved.value()?)?;
        }
        Ok(moved)
    };
    let (moved_mean, moved_variance) = (moved(3, mean, &new_mean)?, moved(4, variance, &new_variance)?);
    Ok(vec![y, moved_mean, moved_variance, new_mean, new_variance])
}

/// Normalization over neighbouring channels.
fn across<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, size) = (c.x(0)?, c.size("size", 1)?.max(1));
    let mut pads = vec![(0, 0); x.dims().len()];
    let Some(of_channels) = pads.get_mut(1) else { return Err(bad("a value without channels")) };
    *of_channels = (((size - 1) / 2) as isize, (size - 1 - (size - 1) / 2) as isize);
    let sums = x.square()?.pad_with(&pads, PadMode::Constant(0.0))?.unfold(1, size, 1, 1)?.sum(&[-1])?;
    let scaled = sums.mul(c.float("alpha", 1e-4) / size as f64)?.add(c.float("bias", 1.0))?;
    one(x.div(&scaled.pow(c.float("beta", 0.75))?))
}

/// Dropout in training, whether the file was written for it or not; the identity in evaluation.
fn dropout<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, ratio) = (c.x(0)?, c.number(1)?.unwrap_or(c.float("ratio", 0.5)));
    if c.is_training() && ratio != 0.0 {
        let (y, mask) = x.dropout_with_mask(ratio, next_seed())?;
        return Ok(vec![y, mask.to_dtype(DType::Bool)?]);
    }
    let mask = if c.outputs() > 1 { Some(Tensor::ones(c.device(), x.dims(), DType::Bool)?) } else { None };
    Ok([x.clone()].into_iter().chain(mask.map(Var::new)).collect())
}
