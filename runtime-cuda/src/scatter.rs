//! Scatters by sorting. Pairs (destination, position) are sorted, stably, so that the sources of each destination are
//! adjacent, in ascending order of their positions. There are no atomics, and the work is proportional to the number of
//! pairs.

use numcore::{Error, Result};

use crate::{
    Cuda,
    axes::{LoopAxes, Steps, without},
    handwritten::{DefineValue, HandwrittenKernel, KernelLaunch, Strided, blocks, element},
    operand::Operand,
    radix::Pairs,
};

/// The numbers of columns and of pairs of a block.
const BLOCK: [usize; 2] = [32, 4];
/// The most blocks along the grid's second axis.
const MOST: usize = 65_535;

pub(crate) fn by_sorting(cuda: &Cuda, src: &Operand, axis: usize, index: &Operand, out: &Operand) -> Result<()> {
    let rank = src.dims().len();
    let others = || (0..rank).filter(|&a| a != axis);
    // Columns share their destinations: the index repeats along them.
    let (columns, lines): (Vec<usize>, Vec<usize>) = others().partition(|&a| index.layout.strides()[a] == 0);
    let (n, size) = (src.dims()[axis], out.dims()[axis]);
    let count = lines.iter().map(|&a| src.dims()[a]).product::<usize>() * n;
    let most = count / n * size;
    if count > u32::MAX as usize {
        let why = format!("{count} indices are more than the {} that one scatter can sort; split it", u32::MAX);
        return Err(Error::unsupported_on(cuda.queue.engine.device, "scatter_add", why));
    }
    // One value above every destination stands for "out of range".
    let bits = (usize::BITS - most.leading_zeros()) as usize;
    let mut pairs = Pairs::new(cuda, if bits <= 32 { 4 } else { 8 }, 1, count)?;
    let defines = [("T", DefineValue::from(element(out.dtype))), ("K", DefineValue::from(pairs.name()))];
    let kernel = |entry| HandwrittenKernel::new("scatter_add.cu", entry, &defines);
    // The lines, then positions along the axis.
    let walked = LoopAxes::narrow(src.dims(), &[index.steps(), src.steps()], lines.iter().copied().chain([axis]));
    let keys = KernelLaunch::new(cuda, "scatter_add", &kernel("scatter_keys"))?
        .arg(pairs.keys[0].address())
        .arg(pairs.places[0].address())
        .arg(index.address)
        .arg(Strided::of(&walked, 0))
        .arg(count as i64)
        .arg(n as i64)
        .arg(size as i64)
        .flag();
    // SAFETY: the contract of `numcore::Runtime`; pairs have space for `count`.
    unsafe { keys.run(blocks(cuda, count), [256, 1])? };
    pairs.sort(cuda, "scatter_add", bits)?;
    let to: Steps = without(out.steps(), axis);
    let line = LoopAxes::narrow(src.dims(), &[to], lines.iter().copied());
    let column = LoopAxes::narrow(src.dims(), &[src.steps(), to], columns.iter().copied());
    let width = column.count();
    let segments = KernelLaunch::new(cuda, "scatter_add", &kernel("scatter_segments"))?
        .arg(out.address)
        .arg(src.address)
        .arg(pairs.keys[0].address())
        .arg(pairs.places[0].address())
        .arg(Strided::of(&walked, 1))
        .arg(Strided::of(&line, 0))
        .arg(Strided::of(&column, 0))
        .arg(Strided::of(&column, 1))
        .arg(count as i64)
        .arg(width as i64)
        .arg(size as i64)
        .arg(out.layout.strides()[axis] as i64);
    let grid = [width.div_ceil(BLOCK[0]).min(i32::MAX as usize), count.div_ceil(BLOCK[1]).min(MOST), 1];
    // SAFETY: as above; each destination's columns have one thread each.
    unsafe { segments.run(grid, BLOCK.map(|b| b as u32)) }
}
