//! Launches of sorts: short rows within a block, long ones by radix sort.

use numcore::{DType, Error, Result, View, ViewMut};

use crate::{
    Cuda,
    axes::{LoopAxes, without},
    handwritten::{HandwrittenKernel, KernelLaunch, Strided, blocks},
    index::ordered,
    operand::Operand,
    radix::Pairs,
};

/// The longest line that is sorted in one block's shared memory.
const SHORT: usize = 4096;

/// The bytes of a key, and the number of its bits that differ.
fn key(dtype: DType) -> (usize, usize) {
    match dtype {
        DType::F64 | DType::I64 => (8, 64),
        DType::U8 | DType::Bool => (4, 8),
        _ => (4, 32),
    }
}

/// Sorts stably along `axis`, into values and positions (`i64`).
pub(crate) fn sort(
    cuda: &Cuda,
    x: View<'_, Cuda>,
    axis: usize,
    descending: bool,
    values: ViewMut<'_, Cuda>,
    index: ViewMut<'_, Cuda>,
) -> Result<()> {
    let (x, values, index) = (Operand::from(x), Operand::from(&values), Operand::from(&index));
    if x.numel() == 0 {
        return Ok(());
    }
    let (dims, n) = (x.dims(), x.dims()[axis]);
    if n > i32::MAX as usize {
        let why = format!("a line of {n} elements is longer than {}", i32::MAX);
        return Err(Error::unsupported_on(cuda.queue.engine.device, "sort", why));
    }
    let steps = [&values, &index, &x].map(|o| without(o.steps(), axis));
    let axes = LoopAxes::narrow(dims, &steps, (0..dims.len()).filter(|&a| a != axis));
    let lines = axes.count();
    let [values_at, index_at, x_at] = [0, 1, 2].map(|i| Strided::of(&axes, i));
    let [values_step, index_step, x_step] = [&values, &index, &x].map(|o| o.layout.strides()[axis] as i64);
    let kernel = |entry| HandwrittenKernel::new("sort.cu", entry, &[("T", ordered(x.dtype).into())]);
    let (bytes, bits) = key(x.dtype);
    if n <= SHORT {
        let width = n.next_power_of_two().max(2);
        let launch = KernelLaunch::new(cuda, "sort", &kernel("sort_short").with_shared((bytes + 4) * width))?
            .arg(values.address)
            .arg(index.address);
        let launch = launch.arg(x.address).arg(values_at).arg(index_at).arg(x_at).arg(n as i32).arg(width as i32);
        let launch = launch.arg(values_step).arg(index_step).arg(x_step).arg(i32::from(descending));
        let threads = (width / 2).clamp(32, 512) as u32;
        // SAFETY: the contract of `numcore::Runtime`; shared memory holds `width` keys and positions.
        return unsafe { launch.run([lines, 1, 1], [threads, 1]) };
    }
    let count = lines * n;
    let mut pairs = Pairs::new(cuda, bytes, lines, n)?;
    let keys = KernelLaunch::new(cuda, "sort", &kernel("sort_keys"))?.arg(pairs.keys[0].address());
    let keys = keys.arg(pairs.places[0].address()).arg(x.address).arg(x_at).arg(count as i64).arg(n as i64);
    // SAFETY: as above; pairs have space for `count`.
    unsafe { keys.arg(x_step).arg(i32::from(descending)).run(blocks(cuda, count), [256, 1])? };
    pairs.sort(cuda, "sort", bits)?;
    let moved = KernelLaunch::new(cuda, "sort", &kernel("sort_values"))?.arg(values.address).arg(index.address);
    let moved = moved.arg(x.address).arg(pairs.places[0].address()).arg(values_at).arg(index_at).arg(x_at);
    let moved = moved.arg(count as i64).arg(n as i64).arg(values_step).arg(index_step).arg(x_step);
    // SAFETY: as above.
    unsafe { moved.run(blocks(cuda, count), [256, 1]) }
}
