//! Products whose right operand is all windows of an image, a column each: packed from the image as tiles read them, a few panels at a time.
//! (With windows as rows, each strip read all weights, the output had to be turned, and a convolution took a quarter longer.)

use std::cell::RefCell;

use super::{
    epilogue::Epilogue,
    factor::{Left, Matrix},
    kernel::{self, Block, Panels, Shape},
    product::{DEPTH, Line, room},
    register::Registers,
};
use crate::{Simd, simd::leveled};

/// Bytes that are packed at once: panels that stay in the second cache beside the image.
const PACKED: usize = 128 << 10;
/// Steps of which a panel is packed before the next ones: their numbers stay in the first cache.
const SOME: usize = 64;
/// Numbers of the longest piece that is copied at once.
const LONGEST: usize = 16;

/// All windows of an image: number `(k, j)` lies `steps[k] + columns[j]` numbers from `at`.
#[derive(Clone, Copy)]
pub(crate) struct Unfolded<'a, T> {
    pub at: *const T,
    pub steps: &'a [usize],
    pub columns: &'a [usize],
}

/// Columns whose numbers are neighbours in every step.
#[derive(Clone, Copy)]
struct Piece {
    /// Their place in a panel's row.
    to: usize,
    /// Their place in the image, at step 0.
    from: usize,
    /// How many they are: a power of two.
    count: usize,
}

thread_local! {
    /// Packed panels; kept, so that a product allocates nothing.
    static PANELS: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// `out = a · windows`, with what the epilogue adds, for `a: [m, k]` and `k` steps of `n` windows.
///
/// # Safety
/// The matrices and all windows lie in their operands; the output overlaps none of them, and nothing else sees it meanwhile.
pub(crate) unsafe fn product_unfolded<T: Registers>(
    simd: Simd,
    m: usize,
    out: Matrix<*mut T>,
    a: Matrix<*const T>,
    windows: Unfolded<'_, T>,
    epilogue: Epilogue<T>,
) {
    let shape = Shape::of::<T>(simd);
    let (panel, k, n) = (shape.registers * shape.lanes, windows.steps.len(), windows.columns.len());
    let columns = (PACKED / size_of::<T>() / k.clamp(1, DEPTH) / panel).max(1) * panel;
    PANELS.with_borrow_mut(|memory| {
        let packed = room::<T>(memory, columns * k.min(DEPTH));
        for j in (0..n).step_by(columns) {
            let some = &windows.columns[j..n.min(j + columns)];
            for (from, steps) in windows.steps.chunks(DEPTH).enumerate().map(|(i, steps)| (i * DEPTH, steps)) {
                let windows = Unfolded { steps, columns: some, ..windows };
                let depth = steps.len();
                let block = Block {
                    rows: m,
                    depth,
                    columns: some.len(),
                    a: Left::Strided(a.part(0, from)),
                    b: Panels { at: packed.as_ptr(), depth, from: 0 },
                    out: out.part(0, j),
                    scale: T::ONE,
                    epilogue: epilogue.part(0, j).of_part(from == 0, from + depth == k),
                };
                // SAFETY: the caller's promise; the memory is packed by the line before. Rows' numbers are neighbours, so none is laid out.
                unsafe {
                    pack(simd, shape, windows, packed);
                    kernel::run(simd, &block, &mut []);
                }
            }
        }
    });
}

/// Packs all windows for tiles of that shape; columns that fill up a panel are left as they are, for nobody reads their sums.
///
/// # Safety
/// All windows lie in one operand, and in `to` there is room for them.
unsafe fn pack<T: Registers>(simd: Simd, shape: Shape, windows: Unfolded<'_, T>, to: &mut [T]) {
    let (depth, n) = (windows.steps.len(), windows.columns.len());
    let mut j = 0;
    while j < n {
        let width = shape.panel(n - j);
        let columns = &windows.columns[j..n.min(j + width)];
        panel(simd, Unfolded { columns, ..windows }, &mut to[j * depth..][..width * depth], width);
        j += width;
    }
}

leveled! {
    /// One panel. The caller of [`pack`] promises what is read.
    fn panel<T: (Registers)>(windows: Unfolded<'_, T>, to: &mut [T], width: usize) {
        let mut pieces = [Piece { to: 0, from: 0, count: 1 }; MOST];
        let count = cut(windows.columns, &mut pieces);
        for (steps, to) in windows.steps.chunks(SOME).zip(to.chunks_mut(SOME * width)) {
            for piece in &pieces[..count] {
                let from = windows.at.wrapping_add(piece.from);
                match piece.count {
                    LONGEST => copy::<T, LONGEST>(from, steps, &mut to[piece.to..], width),
                    8 => copy::<T, 8>(from, steps, &mut to[piece.to..], width),
                    4 => copy::<T, 4>(from, steps, &mut to[piece.to..], width),
                    2 => copy::<T, 2>(from, steps, &mut to[piece.to..], width),
                    _ => copy::<T, 1>(from, steps, &mut to[piece.to..], width),
                }
            }
        }
    }
}

/// Columns of the widest panel, and so the most pieces.
const MOST: usize = 48;

/// Cuts columns into pieces, of which some overlap, and says how many there are.
#[inline(always)]
fn cut(columns: &[usize], pieces: &mut [Piece; MOST]) -> usize {
    let (mut count, mut j) = (0, 0);
    while j < columns.len() {
        let run = (j + 1..columns.len()).take_while(|&i| columns[i] == columns[i - 1] + 1).count() + 1;
        let size = LONGEST.min(1 << run.ilog2());
        let mut i = 0;
        while i < run {
            // The last one ends with the run.
            let at = i.min(run - size);
            pieces[count] = Piece { to: j + at, from: columns[j] + at, count: size };
            (count, i) = (count + 1, i + size);
        }
        j += run;
    }
    count
}

/// The numbers of a piece, in every step. The caller of [`pack`] promises what is read.
#[inline(always)]
fn copy<T: Registers, const N: usize>(from: *const T, steps: &[usize], to: &mut [T], width: usize) {
    for (step, to) in steps.iter().zip(to.chunks_mut(width)) {
        let to = to.as_mut_ptr().cast::<[T; N]>();
        // SAFETY: as said; `N` numbers of a panel's row, which no operand overlaps.
        unsafe { to.write(from.wrapping_add(*step).cast::<[T; N]>().read()) };
    }
}
