//! Layer and RMS norm, and their gradients.

use numcore::{
    Result, Support,
    fused::{Norm, NormKind},
};

use super::{BLOCK, FusedCall, RowShape, WARP};
use crate::handwritten::{HandwrittenKernel, KernelLaunch};

/// The least rows of a group, and the most groups. Sums over rows are partitioned into groups by sizes alone. Where
/// threads hold rows, a group is a block, and four blocks (narrow) or two share a multiprocessor. Other groups are also
/// divided by columns.
const NARROW_GROUPS: (usize, usize) = (8, 512);
const HELD_GROUPS: (usize, usize) = (8, 256);
const GROUPS: (usize, usize) = (64, 64);
/// The number of threads of a column.
const COLUMN_THREADS: u32 = 8;

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
    let packs = rows.packs(call.dtype(), &[y, x, w, b]);
    let kernel = kernel(call, "norm_rows", layer, rows, packs, &[y, x]);
    let launch = KernelLaunch::new(call.cuda, "norm", &kernel)?.arg(y).arg(rstd).arg(mean).arg(x).arg(w).arg(b);
    let (blocks, threads) = rows.grid();
    // SAFETY: the contract of `numcore::Runtime`; rows are contiguous.
    unsafe { launch.arg(rows.rows as i64).arg(rows.width as i64).arg(op.eps).run(blocks, threads)? };
    Ok(Support::Done)
}

/// Computes gradients from `x`, the upstream gradient, `rstd`, `mean` (layer norm) and `w` (if given).
pub(super) fn backward(call: &mut FusedCall<'_>, op: &Norm) -> Result<Support> {
    let layer = op.kind == NormKind::Layer;
    let rows = RowShape::of(&call.outs[0]);
    if rows.width == 0 {
        return Ok(Support::Decompose);
    }
    let (d, x, g, rstd) = (call.outs[0].address, call.dense(0)?, call.dense(1)?, call.dense(2)?);
    let mean = if layer { call.dense(3)? } else { 0 };
    let w = if op.weight { call.dense(if layer { 4 } else { 3 })? } else { 0 };
    let packs = if op.weight { rows.packs(call.dtype(), &[d, x, g, w]) } else { 0 };
    let gradients = Gradients { layer, rows, packs, d, x, g, rstd, mean, w };
    if !op.weight {
        gradients.of_rows(call)?;
        return Ok(Support::Done);
    }
    let groups = match packs {
        0 => GROUPS,
        1 => NARROW_GROUPS,
        _ => HELD_GROUPS,
    };
    let sums = Sums::new(call, op, rows, groups)?;
    if packs > 0 {
        gradients.of_all(call, &sums)?;
    } else {
        gradients.of_rows(call)?;
        gradients.of_columns(call, &sums)?;
    }
    gradients.finish(call, &sums)?;
    Ok(Support::Done)
}

fn kernel(
    call: &FusedCall<'_>,
    entry: &'static str,
    layer: bool,
    rows: RowShape,
    packs: usize,
    operands: &[u64],
) -> HandwrittenKernel {
    call.kernel("norm.cu", entry, &[("LAYER", layer.into()), ("PACKS", packs.into())], rows, operands)
}

/// Sums of the parameters' gradients over groups of rows, `[groups, width]`; `db` is 0 without a bias.
struct Sums {
    dw: u64,
    db: u64,
    group: usize,
    groups: usize,
}

impl Sums {
    fn new(call: &mut FusedCall<'_>, op: &Norm, rows: RowShape, (least, most): (usize, usize)) -> Result<Sums> {
        let group = least.max(rows.rows.div_ceil(most));
        let groups = rows.rows.div_ceil(group);
        let bytes = groups * rows.width * call.dtype().compute().size();
        let db = if op.bias { call.scratch(bytes)? } else { 0 };
        Ok(Sums { dw: call.scratch(bytes)?, db, group, groups })
    }
}

/// A call for gradients: addresses of operands, 0 of those that are absent.
struct Gradients {
    layer: bool,
    rows: RowShape,
    packs: usize,
    d: u64,
    x: u64,
    g: u64,
    rstd: u64,
    mean: u64,
    w: u64,
}

impl Gradients {
    fn launch<'a>(&self, call: &FusedCall<'a>, entry: &'static str) -> Result<KernelLaunch<'a>> {
        let kernel = kernel(call, entry, self.layer, self.rows, self.packs, &[self.d, self.x, self.g]);
        KernelLaunch::new(call.cuda, "norm_grad", &kernel)
    }

    /// Computes the gradient of `x`, and the sums of the parameters' gradients, by one kernel that reads `x` and the
    /// upstream gradient once.
    fn of_all(&self, call: &FusedCall<'_>, sums: &Sums) -> Result<()> {
        if sums.groups == 0 {
            return Ok(());
        }
        let launch = self.launch(call, "norm_grad")?.arg(self.d).arg(sums.dw).arg(sums.db);
        let launch = launch.arg(self.x).arg(self.g).arg(self.rstd).arg(self.mean).arg(self.w);
        let launch = launch.arg(self.rows.rows as i64).arg(self.rows.width as i64).arg(sums.group as i64);
        let threads = self.rows.threads();
        // SAFETY: the contract of `numcore::Runtime`; rows are contiguous and whole packs, and the scratch memory holds
        // a row per group.
        unsafe { launch.arg(call.adds(0)).run([sums.groups, 1, 1], [threads as u32, (BLOCK / threads) as u32]) }
    }

    /// Computes the gradient of `x` alone.
    fn of_rows(&self, call: &FusedCall<'_>) -> Result<()> {
        if self.rows.rows == 0 {
            return Ok(());
        }
        let launch = self.launch(call, "norm_grad_rows")?.arg(self.d).arg(self.x).arg(self.g);
        let launch = launch.arg(self.rstd).arg(self.mean).arg(self.w).arg(self.rows.rows as i64);
        let (blocks, threads) = self.rows.grid();
        // SAFETY: the contract of `numcore::Runtime`; rows are contiguous.
        unsafe { launch.arg(self.rows.width as i64).arg(call.adds(0)).run(blocks, threads) }
    }

    /// Computes the sums of the parameters' gradients.
    fn of_columns(&self, call: &FusedCall<'_>, sums: &Sums) -> Result<()> {
        if sums.groups == 0 {
            return Ok(());
        }
        let launch = self.launch(call, "norm_grad_columns")?.arg(sums.dw).arg(sums.db);
        let launch = launch.arg(self.x).arg(self.g).arg(self.rstd).arg(self.mean);
        let launch = launch.arg(self.rows.rows as i64).arg(self.rows.width as i64).arg(sums.group as i64);
        // SAFETY: as above; the scratch memory holds a row per group.
        unsafe { launch.run([self.rows.width.div_ceil(WARP), sums.groups, 1], [WARP as u32, COLUMN_THREADS]) }
    }

    /// Computes the parameters' gradients from their sums; with no rows these are zeros.
    fn finish(&self, call: &FusedCall<'_>, sums: &Sums) -> Result<()> {
        let biased = call.outs.len() > 2;
        let (db, add_db) = if biased { (call.outs[2].address, call.adds(2)) } else { (0, 0) };
        let launch = self.launch(call, "norm_grad_finish")?.arg(call.outs[1].address).arg(db);
        let launch = launch.arg(sums.dw).arg(sums.db).arg(sums.groups as i64).arg(self.rows.width as i64);
        let grid = [self.rows.width.div_ceil(WARP), 1 + usize::from(biased), 1];
        // SAFETY: as above.
        unsafe { launch.arg(call.adds(1)).arg(add_db).run(grid, [WARP as u32, COLUMN_THREADS]) }
    }
}
