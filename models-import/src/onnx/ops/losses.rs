//! Losses over classes.

use autograd::Var;
use numcore::{
    DType, Runtime,
    fused::NnOps,
    ops::{Apply, IndexOps, PointwiseOps, ReduceOps, ViewOps},
};

use super::{super::call::NodeCall, OperatorRow, indexing::flat, row};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    match op {
        "NegativeLogLikelihoodLoss" => row(&["ignore_index", "reduction"], |c| Ok(vec![likelihood(c, c.x(0)?)?])),
        "SoftmaxCrossEntropyLoss" => row(&["ignore_index", "reduction"], |c| {
            let logs = c.x(0)?.log_softmax(1)?;
            Ok(vec![likelihood(c, &logs)?, logs])
        }),
        _ => None,
    }
}

/// `logs: [N, C, D..]`, of which the targets `[N, D..]` choose; the mean is over the targets' weights.
fn likelihood<R: Runtime>(c: &NodeCall<'_, R>, logs: &Var<R>) -> numcore::Result<Var<R>> {
    let target = c.x(1)?.to_dtype(DType::I64)?;
    let ignored = c.has("ignore_index").then(|| target.eq(c.int("ignore_index", 0) as f64)).transpose()?;
    let target = match &ignored {
        Some(ignored) => target.masked_fill(ignored, 0.0)?,
        None => target,
    };
    let mut loss = logs.gather(1, &target.unsqueeze(1)?)?.squeeze(1)?.neg()?;
    let mut weight = match c.opt(2)? {
        Some(weight) => weight.index_select(0, &flat(&target)?)?.reshape(target.dims())?,
        None => c.scalar(1.0, loss.dtype())?.broadcast_to(loss.spec().shape)?,
    };
    if let Some(ignored) = &ignored {
        weight = weight.masked_fill(ignored, 0.0)?;
    }
    loss = loss.mul(&weight)?;
    match c.text("reduction", "mean") {
        "none" => Ok(loss),
        "sum" => loss.sum_all(),
        _ => loss.sum_all()?.div(&weight.sum_all()?),
    }
}
