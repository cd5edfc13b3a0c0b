//! Launches of gather, and of scatters with few indices per row; `scatter.rs` has the others.

use numcore::{DType, Out, Result, View, ViewMut};

use crate::{
    Cuda,
    axes::{LoopAxes, without},
    handwritten::{DefineValue, HandwrittenKernel, KernelLaunch, Strided, blocks, element},
    operand::Operand,
    pointwise::Target,
    scatter,
};

/// The most indices that a thread of a scatter walks by itself; `WALKED_BY_MANY` with lines enough to fill a device.
const WALKED: usize = 64;
const MANY_LINES: usize = 1 << 15;
const WALKED_BY_MANY: usize = 1 << 12;

/// Computes `out[.., i, ..] = x[.., index[.., i, ..], ..]` along `axis`.
pub(crate) fn gather(
    cuda: &Cuda,
    x: View<'_, Cuda>,
    axis: usize,
    index: View<'_, Cuda>,
    out: Out<'_, Cuda>,
) -> Result<()> {
    let (x, index, out) = (Operand::from(x), Operand::from(index), Target::from(&out));
    if out.to.numel() == 0 {
        return Ok(());
    }
    let (size, step) = (x.dims()[axis], x.layout.strides()[axis]);
    let steps = [out.to.steps(), without(x.steps(), axis), index.steps()];
    let mut axes = LoopAxes::narrow(out.to.dims(), &steps, 0..out.to.dims().len());
    let word = if out.add { out.to.dtype.size() } else { words(&axes, &[&out.to, &x], step) };
    let each = word / out.to.dtype.size();
    in_words(&mut axes, each);
    let t = if out.add { element(out.to.dtype) } else { bits(word) };
    let kernel = HandwrittenKernel::new("gather.cu", "gather", &[("T", t.into()), ("ACCUMULATE", out.add.into())]);
    let count = axes.count();
    let launch = KernelLaunch::new(cuda, "gather", &kernel)?
        .arg(out.to.address)
        .arg(x.address)
        .arg(index.address)
        .arg(Strided::of(&axes, 0))
        .arg(Strided::of(&axes, 1))
        .arg(Strided::of(&axes, 2))
        .arg(count as i64)
        .arg((step / each as isize) as i64)
        .arg(size as i64)
        .flag();
    // SAFETY: the contract of `numcore::Runtime`; an index is checked by the kernel before it is followed.
    unsafe { launch.run(blocks(cuda, count), [256, 1]) }
}

/// Computes `out[.., index[.., i, ..], ..] += src[.., i, ..]` along `axis`, in ascending order of `i`.
pub(crate) fn scatter_add(
    cuda: &Cuda,
    src: View<'_, Cuda>,
    axis: usize,
    index: View<'_, Cuda>,
    out: ViewMut<'_, Cuda>,
) -> Result<()> {
    let (src, index, out) = (Operand::from(src), Operand::from(index), Operand::from(&out));
    if src.numel() == 0 {
        return Ok(());
    }
    let n = src.dims()[axis];
    let lines = src.numel() / n;
    let few = n <= WALKED || (lines >= MANY_LINES && n <= WALKED_BY_MANY);
    // Half-precision sums are rounded once only by sorting, except where there is only one addition to round.
    if !few || (out.dtype.is_half() && n > 1) {
        return scatter::by_sorting(cuda, &src, axis, &index, &out);
    }
    let steps = [&src, &out, &index].map(|o| without(o.steps(), axis));
    let order = (0..src.dims().len()).filter(|&a| a != axis);
    let axes = LoopAxes::narrow(src.dims(), &steps, order);
    let defines = [("T", element(out.dtype).into()), ("K", DefineValue::from("u32"))];
    let kernel = HandwrittenKernel::new("scatter_add.cu", "scatter_lines", &defines);
    let step = |o: &Operand| o.layout.strides()[axis] as i64;
    let launch = KernelLaunch::new(cuda, "scatter_add", &kernel)?
        .arg(out.address)
        .arg(src.address)
        .arg(index.address)
        .arg(Strided::of(&axes, 0))
        .arg(Strided::of(&axes, 1))
        .arg(Strided::of(&axes, 2))
        .arg(lines as i64)
        .arg(n as i64)
        .arg(step(&src))
        .arg(step(&index))
        .arg(out.dims()[axis] as i64)
        .arg(step(&out))
        .flag();
    // SAFETY: as above; no two rows share an output.
    unsafe { launch.run(blocks(cuda, lines), [256, 1]) }
}

/// The number of bytes that can be moved at once: a contiguous run that shares an index, in words to which every row is
/// aligned. `step` is the second operand's stride along the indexed axis.
fn words(axes: &LoopAxes, moved: &[&Operand; 2], step: isize) -> usize {
    let (last, size) = (axes.rank() - 1, moved[0].dtype.size());
    let inner = |i: usize| axes.steps[i][last];
    if inner(0) != 1 || inner(1) != 1 || inner(2) != 0 {
        return size;
    }
    let fits = |word: usize| {
        let each = word / size;
        let whole = |s: isize| s.unsigned_abs().is_multiple_of(each);
        let begins = |i: usize| axes.steps[i][..last].iter().all(|s| whole(*s));
        let aligned = |o: &&Operand| o.address.is_multiple_of(word as u64);
        axes.sizes[last].is_multiple_of(each) && whole(step) && begins(0) && begins(1) && moved.iter().all(aligned)
    };
    [16, 8, 4, 2].into_iter().find(|&word| word > size && fits(word)).unwrap_or(size)
}

/// Changes the axes so that the first two operands are counted in words of `each` elements.
fn in_words(axes: &mut LoopAxes, each: usize) {
    let last = axes.rank() - 1;
    if each == 1 {
        return;
    }
    axes.sizes[last] /= each;
    for steps in &mut axes.steps[..2] {
        steps[..last].iter_mut().for_each(|s| *s /= each as isize);
    }
}

/// The C type that moves `size` bytes.
fn bits(size: usize) -> &'static str {
    match size {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        8 => "u64",
        _ => "v16",
    }
}

/// The C type `T` for kernels that only compare: `bool` is a byte.
pub(crate) fn ordered(dtype: DType) -> &'static str {
    if dtype == DType::Bool { "u8" } else { element(dtype) }
}

#[cfg(test)]
mod tests {
    use numcore::{Layout, Shape};

    use super::*;

    #[test]
    fn rows_of_a_table_move_in_words() {
        let dense = |dims: &[usize], address| Operand {
            address,
            layout: Layout::contiguous(Shape::new(dims).unwrap()),
            dtype: DType::F32,
        };
        let (out, x) = (dense(&[5, 12], 256), dense(&[100, 12], 512));
        let index = Layout::contiguous(Shape::from([5, 1])).broadcast_to(Shape::from([5, 12])).unwrap();
        let index = Operand { address: 0, layout: index, dtype: DType::I64 };
        let steps = [out.steps(), without(x.steps(), 0), index.steps()];
        let mut axes = LoopAxes::narrow(&[5, 12], &steps, 0..2);
        assert_eq!(words(&axes, &[&out, &x], 12), 16);
        assert_eq!(words(&axes, &[&out, &Operand { address: 520, ..x }], 12), 8);
        in_words(&mut axes, 4);
        assert_eq!((&axes.sizes[..], axes.steps[0][0], axes.steps[2][0]), (&[5usize, 3][..], 3, 1));
    }
}
