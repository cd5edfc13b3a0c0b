//! Normalizations, dropout.

use numcore::{
    DType, Tensor,
    fused::NnOps,
    ops::{PadMode, PadOps, PointwiseOps, ReduceOps, ViewOps},
};

use super::one;
use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "LayerNormalization" => layer(c),
        "RMSNormalization" => {
            let (rows, weight) = rows(c, 1)?;
            one(rows.rms_norm(weight.as_ref(), c.float("epsilon", 1e-5))?.reshape(c.x(0)?.dims()))
        }
        "BatchNormalization" => batch(c),
        "InstanceNormalization" => {
            let x = c.x(0)?;
            one(x.group_norm(x.dims()[1], c.opt(1), c.opt(2), c.float("epsilon", 1e-5)))
        }
        "GroupNormalization" => {
            let groups = c.int("num_groups", 1) as usize;
            one(c.x(0)?.group_norm(groups, c.opt(1), c.opt(2), c.float("epsilon", 1e-5)))
        }
        "LRN" => across(c),
        "Dropout" => dropout(c),
        _ => Ok(None),
    }
}

/// The input with all axes from `axis` on as one, and the weight that is input `i`.
fn rows(c: &Call<'_>, i: usize) -> Answer<(T, Option<T>)> {
    let x = c.x(0)?;
    let axis = x.shape().axis("norm", c.int("axis", -1) as isize)?;
    let count: usize = x.dims()[..axis].iter().product();
    let inner = x.shape().numel() / count;
    let flat = |w: &T| w.broadcast_to(&x.dims()[axis..])?.reshape([inner]);
    Ok((x.reshape([count, inner])?, c.opt(i).map(flat).transpose()?))
}

fn layer(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (rows, weight) = rows(c, 1)?;
    let (x, eps) = (c.x(0)?, c.float("epsilon", 1e-5));
    let axis = x.shape().axis("norm", c.int("axis", -1) as isize)?;
    let bias = c.opt(2).map(|b| b.broadcast_to(&x.dims()[axis..])?.reshape([rows.dims()[1]])).transpose()?;
    let y = rows.layer_norm(weight.as_ref(), bias.as_ref(), eps)?.reshape(x.dims())?;
    let axes: Vec<isize> = (axis as isize..x.dims().len() as isize).collect();
    let wide = x.to_dtype(DType::F32)?;
    let deviation = wide.var_keepdim(&axes, 0)?.add(eps)?.rsqrt()?;
    Ok(Some(vec![y, wide.mean_keepdim(&axes)?, deviation]))
}

fn batch(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (x, eps) = (c.x(0)?, c.float("epsilon", 1e-5));
    if c.int("training_mode", 0) == 0 {
        return one(x.batch_norm(c.x(3)?, c.x(4)?, c.opt(1), c.opt(2), eps));
    }
    let (y, mean, variance) = x.batch_norm_train(c.opt(1), c.opt(2), eps)?;
    let kept = c.float("momentum", 0.9);
    let running = |old: &T, new: &T| old.mul(kept)?.add(&new.mul(1.0 - kept)?);
    // The framework's variance, for running statistics, divides by one less than the count.
    let count = (x.shape().numel() / x.dims()[1]) as f64;
    let axes: Vec<isize> = (0..x.dims().len() as isize).filter(|&a| a != 1).collect();
    let population = x.var(&axes, 0)?;
    assert!(variance.dims() == population.dims() && count > 1.0);
    Ok(Some(vec![y, running(c.x(3)?, &mean)?, running(c.x(4)?, &population)?]))
}

/// Normalization over neighbouring channels.
fn across(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let (x, size) = (c.x(0)?, c.int("size", 1) as usize);
    let mut pads = vec![(0, 0); x.dims().len()];
    pads[1] = (((size - 1) / 2) as isize, (size - 1 - (size - 1) / 2) as isize);
    let sums = x.square()?.pad_with(&pads, PadMode::Constant(0.0))?.unfold(1, size, 1, 1)?.sum(&[-1])?;
    let scaled = sums.mul(c.float("alpha", 1e-4) / size as f64)?.add(c.float("bias", 1.0))?;
    one(x.div(&scaled.pow(c.float("beta", 0.75))?))
}

/// Only what keeps everything has a defined result.
fn dropout(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    let x = c.x(0)?;
    let training = c.opt(2).map(|x| x.item()).transpose()?.unwrap_or(0.0) != 0.0;
    let ratio = c.opt(1).map(|x| x.item()).transpose()?.unwrap_or(c.float("ratio", 0.5));
    if !training || ratio == 0.0 {
        return Ok(Some(vec![x.clone(), Tensor::ones(c.cpu(), x.dims(), DType::Bool)?]));
    }
    let (y, mask) = x.dropout_with_mask(ratio, c.int("seed", 0) as u64)?;
    Ok(Some(vec![y, mask.to_dtype(DType::Bool)?]))
}
