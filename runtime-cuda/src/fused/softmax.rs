//! Softmax, its logarithm, and their gradients.

use numcore::{
    Result, Support,
    fused::{Softmax, SoftmaxGrad},
};

use super::{FusedCall, RowShape};
use crate::handwritten::KernelLaunch;

pub(super) fn forward(call: &mut FusedCall<'_>, op: &Softmax) -> Result<Support> {
    let (x, y) = (call.dense(0)?, call.outs[0].address);
    rows(call, "softmax", op.log, &[y, x])
}

/// Computes the gradient from the output and the upstream gradient.
pub(super) fn backward(call: &mut FusedCall<'_>, op: &SoftmaxGrad) -> Result<Support> {
    let (y, g, d) = (call.dense(0)?, call.dense(1)?, call.outs[0].address);
    rows(call, "softmax_grad", op.log, &[d, y, g])
}

/// Launches a kernel that takes the addresses of its operands, then rows and width.
fn rows(call: &FusedCall<'_>, entry: &'static str, log: bool, operands: &[u64]) -> Result<Support> {
    let rows = RowShape::of(&call.outs[0]);
    if call.outs[0].numel() == 0 {
        return Ok(Support::Done);
    }
    let kernel = call.kernel("softmax.cu", entry, &[("LOG", log.into())], rows, operands);
    let mut launch = KernelLaunch::new(call.cuda, entry, &kernel)?;
    for at in operands {
        launch = launch.arg(*at);
    }
    let (blocks, threads) = rows.grid();
    // SAFETY: the contract of `numcore::Runtime`; rows are contiguous.
    unsafe { launch.arg(rows.rows as i64).arg(rows.width as i64).run(blocks, threads)? };
    Ok(Support::Done)
}
