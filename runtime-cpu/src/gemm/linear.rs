//! Linear layers: a GEMM with a bias and a residual in its epilogue.

use numcore::{Accumulate, Layout, Result, Shape, View};

use super::gemm_into;
use crate::{Cpu, CpuBuffer, operand::Operand, pointwise::convert};

/// Computes `out = x · w + b + r` for `ins` of `x: [.., M, K]`, `w: [K, N]` and addends (`[N]` or `[.., M, N]`); `out`
/// is contiguous.
pub(crate) fn linear(cpu: &Cpu, ins: &[View<'_, Cpu>], out: Operand) -> Result<()> {
    let columns = ins[1].layout().dims()[1];
    let inner = ins[1].layout().dims()[0];
    let rows = out.layout.numel() / columns.max(1);
    let whole = Shape::from([rows, columns]);
    let out = Operand { layout: Layout::contiguous(whole).at(out.layout.offset()), ..out };
    let (x, _copy) = flat(cpu, ins[0].into(), Shape::from([rows, inner]))?;
    let mut copies: [Option<CpuBuffer>; 2] = [None, None];
    let mut added = [None, None];
    for ((v, copy), added) in ins[2..].iter().zip(&mut copies).zip(&mut added) {
        let v = Operand::from(*v);
        let (operand, copied) = match v.layout.rank() {
            1 => (Operand { layout: v.layout.broadcast_to(whole)?, ..v }, None),
            _ => flat(cpu, v, whole)?,
        };
        (*added, *copy) = (Some(operand), copied);
    }
    gemm_into(cpu, &x, &ins[1].into(), out, Accumulate::Overwrite, added)
}

/// The operand as a matrix: a view of it, or a copy. A first copy keeps axes that the operand broadcasts (stride 0);
/// where a matrix cannot express those, all elements are written out.
fn flat(cpu: &Cpu, x: Operand, shape: Shape) -> Result<(Operand, Option<CpuBuffer>)> {
    if let Some(layout) = x.layout.reshape(shape) {
        return Ok((Operand { layout, ..x }, None));
    }
    let whole = Layout::contiguous(*x.layout.shape());
    let copy = cpu.scratch(x.bytes())?;
    convert(&cpu.queue.engine, x, Operand::of(&copy, whole, x.dtype), Accumulate::Overwrite)?;
    Ok((Operand::of(&copy, Layout::contiguous(shape), x.dtype), Some(copy)))
}
