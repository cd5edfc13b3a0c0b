//! Columns of the right operand in the order in which tiles read them: panel after panel, a panel's rows one after the other.

use super::{factor::Matrix, kernel::Shape, register::Registers};
use crate::{Simd, pointwise::turn, simd::prefetch};

/// Rows between asking for one and copying it.
const AHEAD: usize = 4;

/// Packs `depth × columns` of `b` for tiles of that shape; columns that fill up a panel are zero. `to` has room for
/// `columns`, rounded up to whole registers, times `depth`.
///
/// # Safety
/// The numbers of `b` lie in its operand.
pub(super) unsafe fn pack<T: Registers>(
    simd: Simd,
    shape: Shape,
    b: Matrix<*const T>,
    (depth, columns): (usize, usize),
    to: &mut [T],
) {
    let mut j = 0;
    if b.column == 1 {
        let (panels, width) = (shape.full_panels(columns), shape.registers * shape.lanes);
        // SAFETY: the caller's promise.
        unsafe { copy(b, (depth, panels, width), to) };
        j = panels * width;
    }
    while j < columns {
        let width = shape.panel(columns - j);
        let there = width.min(columns - j);
        let to = &mut to[j * depth..][..width * depth];
        // SAFETY: the caller's promise.
        unsafe {
            match (b.part(0, j), there == width) {
                (b, true) if b.column == 1 => copy(b, (depth, 1, width), to),
                (b, true) if b.row == 1 => {
                    let line = (width * size_of::<T>()) as isize;
                    let from = (b.at.cast_mut().cast(), b.column * size_of::<T>() as isize);
                    turn::<T>(simd, (to.as_mut_ptr().cast(), line), from, (depth, width));
                }
                (b, _) => gather(b, width, there, to),
            }
        }
        j += width;
    }
}

/// Panels of rows whose numbers are neighbours: all panels of a row, then the next row. (Panel by panel, short stretches of rows
/// that lie a power of two apart sweep each other out of the first cache: up to 3 % of a product of 1024³.)
///
/// # Safety
/// As for [`pack`].
unsafe fn copy<T: Registers>(b: Matrix<*const T>, (depth, panels, width): (usize, usize, usize), to: &mut [T]) {
    for k in 0..depth {
        prefetch(b.part(k + AHEAD, 0).at, panels * width);
        for panel in 0..panels {
            let to = &mut to[(panel * depth + k) * width..][..width];
            // SAFETY: the caller's promise; packed memory is another's.
            unsafe { to.as_mut_ptr().copy_from_nonoverlapping(b.part(k, panel * width).at, width) };
        }
    }
}

/// Any strides, and a panel that is not full.
///
/// # Safety
/// As for [`pack`].
unsafe fn gather<T: Registers>(b: Matrix<*const T>, width: usize, there: usize, to: &mut [T]) {
    for (k, row) in to.chunks_exact_mut(width).enumerate() {
        for (j, x) in row[..there].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *x = unsafe { *b.part(k, j).at };
        }
        row[there..].fill(T::ZERO);
    }
}
