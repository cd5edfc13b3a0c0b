//! Products whose right operand is all windows of an image, a column each: packed from the image as tiles read them, a few panels at a time.
//! (Read by registers where they lie instead, a step's numbers span two cache lines each, and windows that reach over the end of a line are computed for
//! nothing: no faster. With windows as rows each strip read all weights, and the output had to be turned.)

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
/// Columns that are copied at once.
const PIECE: usize = 16;
/// Numbers behind an image that may be read, whatever they are.
pub(crate) const BEHIND: usize = PIECE - 1;
/// Columns of the widest panel, and so the most pieces.
const WIDEST: usize = 48;

/// All windows of an image: number `(k, j)` lies `steps[k] + columns[j]` numbers from `at`. Steps are the same places in every channel, which
/// lie `plane` numbers apart; columns ascend.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "tiles alone look at channels"))]
pub(crate) struct Unfolded<'a, T> {
    pub at: *const T,
    pub plane: usize,
    pub places: usize,
    pub steps: &'a [usize],
    pub columns: &'a [usize],
}

#[cfg(target_arch = "x86_64")]
impl<'a, T> Unfolded<'a, T> {
    /// The same memory, as numbers of another type.
    pub(super) fn cast<U>(self) -> Unfolded<'a, U> {
        let Unfolded { at, plane, places, steps, columns } = self;
        Unfolded { at: at.cast(), plane, places, steps, columns }
    }

    pub(super) fn channels(&self) -> usize {
        self.steps.len() / self.places
    }
}

thread_local! {
    /// Packed panels; kept, so that a product allocates nothing.
    static PANELS: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// `out = a · windows`, with what the epilogue adds, for `a: [m, k]`, whose rows are lines, and `k` steps of `n` windows.
///
/// # Safety
/// The matrices and all windows lie in their operands, and so do [`BEHIND`] numbers behind the last window; the output overlaps none of them,
/// and nothing else sees it meanwhile.
pub(super) unsafe fn product_unfolded<T: Registers>(
    simd: Simd,
    m: usize,
    out: Matrix<*mut T>,
    a: Matrix<*const T>,
    windows: Unfolded<'_, T>,
    epilogue: Epilogue<T>,
) {
    debug_assert_eq!(a.column, 1);
    let shape = Shape::of::<T>(simd);
    let (panel, k) = (shape.registers * shape.lanes, windows.steps.len());
    let most = (PACKED / size_of::<T>() / k.clamp(1, DEPTH) / panel).max(1) * panel;
    PANELS.with_borrow_mut(|memory| {
        let packed = room::<T>(memory, most * k.min(DEPTH) + BEHIND);
        for (i, columns) in windows.columns.chunks(most).enumerate() {
            let j = i * most;
            for (i, steps) in windows.steps.chunks(DEPTH).enumerate() {
                let (from, depth) = (i * DEPTH, steps.len());
                let block = Block {
                    rows: m,
                    depth,
                    columns: columns.len(),
                    a: Left::Strided(a.part(0, from)),
                    b: Panels { at: packed.as_ptr(), depth, from: 0 },
                    out: out.part(0, j),
                    scale: T::ONE,
                    epilogue: epilogue.part(0, j).of_part(from == 0, from + depth == k),
                };
                pack(simd, shape, Unfolded { steps, columns, ..windows }, packed);
                // SAFETY: the caller's promise; the memory is packed by the line before. Rows are lines, so none is laid out.
                unsafe { kernel::run(simd, &block, &mut []) };
            }
        }
    });
}

leveled! {
    /// Packs windows for tiles of that shape, panel after panel. Numbers behind a panel's columns are left to be anything. The caller of
    /// [`product_unfolded`] promises what is read; behind the panels there is room for [`BEHIND`] numbers.
    fn pack<T: (Registers)>(shape: Shape, windows: Unfolded<'_, T>, to: &mut [T]) {
        let (mut columns, mut to) = (windows.columns, to);
        while !columns.is_empty() {
            let width = shape.panel(columns.len());
            let mut pieces = [(0, 0); WIDEST];
            let pieces = cut(&columns[..width.min(columns.len())], &mut pieces);
            for (k, step) in windows.steps.iter().enumerate() {
                let from = windows.at.wrapping_add(*step);
                let row = &mut to[k * width..][..width + BEHIND];
                for &(place, window) in pieces {
                    let row = row[place..][..PIECE].as_mut_ptr().cast::<[T; PIECE]>();
                    // SAFETY: as said; a piece of a row that nothing else sees. What it writes behind its own columns is written again, by
                    // the pieces, rows and panels that follow.
                    unsafe { row.write(from.wrapping_add(window).cast::<[T; PIECE]>().read()) };
                }
            }
            to = &mut to[width * windows.steps.len()..];
            columns = &columns[width.min(columns.len())..];
        }
    }
}

/// Cuts columns into pieces of neighbours: where one begins in a panel's row, and in the image at step 0.
#[inline(always)]
fn cut<'a>(columns: &[usize], pieces: &'a mut [(usize, usize); WIDEST]) -> &'a [(usize, usize)] {
    let mut count = 0;
    let mut next = 0;
    for (j, &column) in columns.iter().enumerate() {
        let follows = j > 0 && column == columns[j - 1] + 1;
        if !follows || j == next {
            pieces[count] = (j, column);
            (count, next) = (count + 1, j + PIECE);
        }
    }
    &pieces[..count]
}
