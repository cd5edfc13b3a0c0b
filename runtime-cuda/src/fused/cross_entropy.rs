//! Cross-entropy and its gradient: logits are read, probabilities never stored.

use numcore::{Result, Support, fused::CrossEntropy};

use super::{FusedCall, RowShape, pitch_of};
use crate::handwritten::KernelLaunch;

pub(super) fn forward(call: &mut FusedCall<'_>, op: &CrossEntropy) -> Result<Support> {
    let rows = RowShape::of(&call.ins[0]);
    if rows.width == 0 {
        return Ok(Support::Decompose);
    }
    let (x, pitch) = call.pitched(0)?;
    let target = call.dense(1)?;
    let w = if op.weighted { call.dense(2)? } else { 0 };
    if rows.rows == 0 {
        return Ok(Support::Done);
    }
    let smooth = [("SMOOTH", (op.label_smoothing != 0.0).into())];
    let kernel = call.kernel("cross_entropy.cu", "cross_entropy", &smooth, rows, &[x]);
    let launch = KernelLaunch::new(call.cuda, "cross_entropy", &kernel)?;
    let launch =
        call.outs.iter().fold(launch, |launch, out| launch.arg(out.address)).arg(x).arg(target).arg(w).arg(pitch);
    finish(op, rows, launch)
}

/// Computes the gradient from logits, classes, the rows' statistics, the upstream gradient and class weights (if
/// given).
pub(super) fn backward(call: &mut FusedCall<'_>, op: &CrossEntropy) -> Result<Support> {
    let rows = RowShape::of(&call.ins[0]);
    let (x, pitch) = call.pitched(0)?;
    let target = call.dense(1)?;
    let (top, log_sum, g) = (call.dense(2)?, call.dense(3)?, call.dense(4)?);
    let w = if op.weighted { call.dense(5)? } else { 0 };
    if call.outs[0].numel() == 0 {
        return Ok(Support::Done);
    }
    let (d, d_pitch) = (call.outs[0].address, pitch_of(&call.outs[0]));
    let smooth = [("SMOOTH", (op.label_smoothing != 0.0).into())];
    // Vector accesses need rows that begin alike, so the difference of the two pitches is checked like an address.
    let apart = (pitch.abs_diff(d_pitch)) * call.dtype().size() as u64;
    let kernel = call.kernel("cross_entropy.cu", "cross_entropy_grad", &smooth, rows, &[d, x, apart]);
    let launch = KernelLaunch::new(call.cuda, "cross_entropy_grad", &kernel)?;
    let launch = launch.arg(d).arg(x).arg(target).arg(top).arg(log_sum).arg(g).arg(w).arg(d_pitch).arg(pitch);
    finish(op, rows, launch)
}

/// Appends the last parameters of both kernels, and launches.
fn finish(op: &CrossEntropy, rows: RowShape, launch: KernelLaunch<'_>) -> Result<Support> {
    let launch = launch.arg(rows.rows as i64).arg(rows.width as i64).arg(op.ignore_index).arg(op.label_smoothing);
    let (blocks, threads) = rows.grid();
    // SAFETY: the contract of `numcore::Runtime`; rows are contiguous, `pitch` apart; a class is checked before it is
    // followed.
    unsafe { launch.flag().run(blocks, threads)? };
    Ok(Support::Done)
}
