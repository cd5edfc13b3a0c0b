//! Losses over classes.

use numcore::{
    DType,
    fused::NnOps,
    ops::{IndexOps, PointwiseOps, ReduceOps, ViewOps},
};

use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "NegativeLogLikelihoodLoss" => Ok(Some(vec![likelihood(c, c.x(0)?)?])),
        "SoftmaxCrossEntropyLoss" => {
            let logs = c.x(0)?.log_softmax(1)?;
            Ok(Some(vec![likelihood(c, &logs)?, logs]))
        }
        _ => Ok(None),
    }
}

/// `logs: [N, C, D..]`, of which the targets `[N, D..]` choose; the mean is over the targets' weights.
fn likelihood(c: &Call<'_>, logs: &T) -> Answer<T> {
    let target = c.x(1)?.to_dtype(DType::I64)?;
    let ignored = c.has("ignore_index").then(|| target.eq(c.int("ignore_index", 0) as f64)).transpose()?;
    let target = match &ignored {
        Some(ignored) => target.masked_fill(ignored, 0.0)?,
        None => target,
    };
    let mut loss = logs.gather(1, &target.unsqueeze(1)?)?.squeeze(1)?.neg()?;
    let count = target.shape().numel();
    let mut weight = match c.opt(2) {
        Some(weight) => weight.index_select(0, &target.reshape([count])?)?.reshape(target.dims())?,
        None => loss.mul(0.0)?.add(1.0)?,
    };
    if let Some(ignored) = &ignored {
        weight = weight.masked_fill(ignored, 0.0)?;
    }
    loss = loss.mul(&weight)?;
    Ok(match c.text("reduction", "mean") {
        "none" => loss,
        "sum" => loss.sum_all()?,
        _ => loss.sum_all()?.div(&weight.sum_all()?)?,
    })
}
