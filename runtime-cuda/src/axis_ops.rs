//! Launches along one axis: arg-reductions and recurrences (scans). The partition of a line depends only on sizes.

use numcore::{ArgOp, Result, ScanOp, View, ViewMut};

use crate::{
    Cuda,
    axes::{LoopAxes, without},
    handwritten::{HandwrittenKernel, KernelLaunch, Strided, blocks},
    index::ordered,
    operand::Operand,
};

/// The number of lines (`MANY`) that fill a device with one thread each. A line of at most `SHORT` elements is not
/// worth a block.
const MANY: usize = 1 << 14;
const SHORT: usize = 64;
/// The least length (`LONG`) of lines that are partitioned, when there are fewer of them than `FEW`.
const LONG: usize = 1 << 14;
const FEW: usize = 256;
/// The most parts of a line.
const PARTS: usize = 1024;

/// The number of parts of a line, and their length: a multiple of the kernels' tiles.
fn parts(lines: usize, n: usize) -> (usize, usize) {
    if lines >= FEW || n <= LONG {
        return (1, n);
    }
    let part = n.div_ceil(PARTS).next_multiple_of(LONG);
    (n.div_ceil(part), part)
}

/// All axes but `axis`, over operands whose stride along it is set to 0.
fn lines_of(dims: &[usize], axis: usize, operands: &[&Operand]) -> LoopAxes {
    let steps: Vec<_> = operands.iter().map(|o| without(o.steps(), axis)).collect();
    LoopAxes::narrow(dims, &steps, (0..dims.len()).filter(|&a| a != axis))
}

/// Writes the position (`i64`) of an extreme along `axis`.
pub(crate) fn arg_reduce(cuda: &Cuda, op: ArgOp, x: View<'_, Cuda>, axis: usize, out: ViewMut<'_, Cuda>) -> Result<()> {
    let (x, out) = (Operand::from(x), Operand::from(&out));
    if out.numel() == 0 {
        return Ok(());
    }
    let axes = lines_of(x.dims(), axis, &[&out, &x]);
    let (lines, n, step) = (axes.count(), x.dims()[axis], x.layout.strides()[axis]);
    let defines = [("T", ordered(x.dtype).into()), ("LARGEST", (op == ArgOp::Max).into())];
    let kernel = |entry| HandwrittenKernel::new("arg_reduce.cu", entry, &defines);
    let (out_at, x_at) = (Strided::of(&axes, 0), Strided::of(&axes, 1));
    if n <= SHORT || (lines >= MANY && step.unsigned_abs() != 1) {
        let launch = KernelLaunch::new(cuda, "arg_reduce", &kernel("arg_reduce_columns"))?;
        let launch = launch.arg(out.address).arg(x.address).arg(out_at).arg(x_at);
        let launch = launch.arg(lines as i64).arg(n as i64).arg(step as i64);
        // SAFETY: the contract of `numcore::Runtime`.
        return unsafe { launch.run(blocks(cuda, lines), [256, 1]) };
    }
    let rows = kernel("arg_reduce_rows");
    let launch = |to: u64, candidates: u64, n: usize, part: usize| -> Result<KernelLaunch<'_>> {
        let launch = KernelLaunch::new(cuda, "arg_reduce", &rows)?.arg(to).arg(candidates).arg(x.address);
        Ok(launch.arg(out_at).arg(x_at).arg(n as i64).arg(step as i64).arg(part as i64))
    };
    let (count, part) = parts(lines, n);
    if count == 1 {
        // SAFETY: as above.
        return unsafe { launch(out.address, 0, n, n)?.run([lines, 1, 1], [256, 1]) };
    }
    let best = cuda.scratch(lines * count * 8)?;
    // SAFETY: as above; the scratch memory holds one position per part.
    unsafe {
        launch(best.address(), 0, n, part)?.run([lines, count, 1], [256, 1])?;
        launch(out.address, best.address(), count, count)?.run([lines, 1, 1], [256, 1])
    }
}

/// The first address and the stride in elements of a scan's operand along an axis; with `reverse`, from its last
/// element.
fn along(x: &Operand, axis: usize, reverse: bool) -> (u64, i64) {
    let (n, step) = (x.dims()[axis] as i64, x.layout.strides()[axis] as i64);
    match reverse {
        false => (x.address, step),
        true => (x.address.wrapping_add_signed((n - 1) * step * x.dtype.size() as i64), -step),
    }
}

/// Runs the recurrence `op` along `axis`.
pub(crate) fn scan(
    cuda: &Cuda,
    op: ScanOp,
    x: View<'_, Cuda>,
    a: Option<View<'_, Cuda>>,
    axis: usize,
    reverse: bool,
    out: ViewMut<'_, Cuda>,
) -> Result<()> {
    let (x, out) = (Operand::from(x), Operand::from(&out));
    if out.numel() == 0 {
        return Ok(());
    }
    let a = a.map(Operand::from);
    let other = a.unwrap_or(x);
    let axes = lines_of(x.dims(), axis, &[&out, &x, &other]);
    let (lines, n) = (axes.count(), x.dims()[axis]);
    let number = match op {
        ScanOp::Sum => 0usize,
        ScanOp::Prod => 1,
        ScanOp::Linear => 2,
    };
    let defines = [("T", ordered(x.dtype).into()), ("OP", number.into())];
    let kernel = |entry| HandwrittenKernel::new("scan.cu", entry, &defines);
    let [y_at, x_at, a_at] = [0, 1, 2].map(|i| Strided::of(&axes, i));
    let [(y, y_step), (x_first, x_step), (a_first, a_step)] = [&out, &x, &other].map(|o| along(o, axis, reverse));
    if n <= SHORT || lines >= MANY {
        let launch = KernelLaunch::new(cuda, "scan", &kernel("scan_lines"))?.arg(y).arg(x_first).arg(a_first);
        let launch = launch.arg(y_at).arg(x_at).arg(a_at).arg(lines as i64).arg(n as i64);
        let launch = launch.arg(y_step).arg(x_step).arg(a_step);
        // SAFETY: the contract of `numcore::Runtime`; all elements of a row are inside of its operands.
        return unsafe { launch.run(blocks(cuda, lines), [256, 1]) };
    }
    let (count, part) = parts(lines, n);
    let values = |starts: u64| -> Result<KernelLaunch<'_>> {
        let launch =
            KernelLaunch::new(cuda, "scan", &kernel("scan_values"))?.arg(y).arg(x_first).arg(a_first).arg(starts);
        let launch = launch.arg(y_at).arg(x_at).arg(a_at).arg(n as i64).arg(part as i64);
        Ok(launch.arg(y_step).arg(x_step).arg(a_step))
    };
    if count == 1 {
        // SAFETY: as above.
        return unsafe { values(0)?.run([lines, 1, 1], [256, 1]) };
    }
    let bytes = lines * count * x.dtype.compute().size();
    let [starts, a_parts, x_parts] = [cuda.scratch(bytes)?, cuda.scratch(bytes)?, cuda.scratch(bytes)?];
    let composed =
        KernelLaunch::new(cuda, "scan", &kernel("scan_parts"))?.arg(a_parts.address()).arg(x_parts.address());
    let composed = composed.arg(x_first).arg(a_first).arg(x_at).arg(a_at).arg(n as i64).arg(part as i64);
    let starting =
        KernelLaunch::new(cuda, "scan", &kernel("scan_starts"))?.arg(starts.address()).arg(a_parts.address());
    // SAFETY: as above; the scratch memory holds one value per part.
    unsafe {
        composed.arg(x_step).arg(a_step).run([lines, count, 1], [256, 1])?;
        starting.arg(x_parts.address()).arg(lines as i64).arg(count as i64).run(blocks(cuda, lines), [256, 1])?;
        values(starts.address())?.run([lines, count, 1], [256, 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_line_and_fit_a_grid() {
        for (lines, n) in [(1, 1 << 26), (3, LONG + 1), (255, 100_000), (256, 1 << 20), (1, 5)] {
            let (count, part) = parts(lines, n);
            assert!(count * part >= n && (count - 1) * part < n && count <= PARTS);
            assert!(count == 1 || part.is_multiple_of(1024));
        }
    }
}
