//! Layer and RMS norm, and their gradients.

use numcore::{
    Result, Support,
    fused::{Norm, NormKind},
};

use super::{FusedCall, RowShape};
use crate::handwritten::{KernelLaunch, blocks};

/// The smallest number of rows in a group, and the largest number of groups: sums over rows are partitioned into them
/// by sizes alone.
const GROUP: usize = 64;
const GROUPS: usize = 64;

pub(super) fn forward(call: &mut FusedCall<'_>, op: &Norm) -> Result<Support> {
    let layer = op.kind == NormKind::Layer;
    let rows = RowShape::of(&call.outs[0]);
    let x = call.dense(0)?;
    let w = if op.weight { call.dense(1)? } else { 0 };
    let b = if op.bias { call.dense(2)? } else { 0 };
    let (y, rstd) = (call.outs[0].address, call.outs[1].address);
    let mean = if layer { call.outs[2].address } else { 0 };
    if rows.rows == 0 {
        return Ok(Support::Done);
    }
    if rows.width == 0 {
        return Ok(Support::Decompose);
    }
    let kernel = call.kernel("norm.cu", "norm_rows", ("LAYER", layer), rows, &[y, x]);
    let launch = KernelLaunch::new(call.cuda, "norm", &kernel)?.arg(y).arg(rstd).arg(mean).arg(x).arg(w).arg(b);
    let (blocks, threads) = rows.grid();
    // SAFETY: the contract of `numcore::Runtime`; rows are contiguous.
    unsafe { launch.arg(rows.rows as i64).arg(rows.width as i64).arg(op.eps).run(blocks, threads)? };
    Ok(Support::Done)
}

/// From `x`, the upstream gradient, `rstd`, `mean` (layer norm) and `w` (if given).
pub(super) fn backward(call: &mut FusedCall<'_>, op: &Norm) -> Result<Support> {
    let layer = op.kind == NormKind::Layer;
    let rows = RowShape::of(&call.outs[0]);
    if rows.width == 0 {
        return Ok(Support::Decompose);
    }
    let (x, g, rstd) = (call.dense(0)?, call.dense(1)?, call.dense(2)?);
    let mean = if layer { call.dense(3)? } else { 0 };
    let w = if op.weight { call.dense(if layer { 4 } else { 3 })? } else { 0 };
    if rows.rows > 0 {
        let d = call.outs[0].address;
        let kernel = call.kernel("norm.cu", "norm_grad_rows", ("LAYER", layer), rows, &[d, x, g]);
        let launch =
            KernelLaunch::new(call.cuda, "norm_grad", &kernel)?.arg(d).arg(x).arg(g).arg(rstd).arg(mean).arg(w);
        let (blocks, threads) = rows.grid();
        // SAFETY: the contract of `numcore::Runtime`; rows are contiguous.
        unsafe { launch.arg(rows.rows as i64).arg(rows.width as i64).run(blocks, threads)? };
    }
    if op.weight {
        parameters(call, op, rows, [x, g, rstd, mean])?;
    }
    Ok(Support::Done)
}

/// The gradients of weight and bias: sums over groups of rows, then over the groups.
fn parameters(call: &mut FusedCall<'_>, op: &Norm, rows: RowShape, [x, g, rstd, mean]: [u64; 4]) -> Result<()> {
    let RowShape { rows: count, width } = rows;
    let group = GROUP.max(count.div_ceil(GROUPS));
    let groups = count.div_ceil(group);
    let bytes = groups * width * call.dtype().compute().size();
    let dw = call.scratch(bytes)?;
    let db = if op.bias { call.scratch(bytes)? } else { 0 };
    let kernel = |entry| {
        call.kernel("norm.cu", entry, ("LAYER", op.kind == NormKind::Layer), RowShape { rows: 0, width: 0 }, &[])
    };
    if groups > 0 {
        let launch = KernelLaunch::new(call.cuda, "norm_grad", &kernel("norm_grad_columns"))?.arg(dw).arg(db);
        let launch = launch.arg(x).arg(g).arg(rstd).arg(mean).arg(count as i64).arg(width as i64).arg(group as i64);
        // SAFETY: as above; the scratch memory holds a row per group.
        unsafe { launch.run([width.div_ceil(32), groups, 1], [32, 8])? };
    }
    for (k, parts) in [dw, db].into_iter().enumerate().take(1 + usize::from(op.bias)) {
        let launch =
            KernelLaunch::new(call.cuda, "norm_grad", &kernel("norm_grad_finish"))?.arg(call.outs[k + 1].address);
        let launch = launch.arg(parts).arg(groups as i64).arg(width as i64);
        // SAFETY: as above.
        unsafe { launch.run(blocks(call.cuda, width), [256, 1])? };
    }
    Ok(())
}
