//! Columns of the right operand in the order in which tiles read them: panel after panel, a panel's rows one after the other.

use super::{
    factor::{AHEAD, Matrix},
    kernel::Shape,
    register::Registers,
};
use crate::{Simd, pointwise::turn, simd::prefetch};

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
    while j < columns {
        let width = shape.panel(columns - j);
        let there = width.min(columns - j);
        let to = &mut to[j * depth..][..width * depth];
        // SAFETY: the caller's promise.
        unsafe {
            match (b.part(0, j), there == width) {
                (b, true) if b.column == 1 => copy(b, width, to),
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

/// Rows whose numbers are neighbours.
///
/// # Safety
/// As for [`pack`].
unsafe fn copy<T: Registers>(b: Matrix<*const T>, width: usize, to: &mut [T]) {
    for (k, row) in to.chunks_exact_mut(width).enumerate() {
        prefetch(b.part(k + AHEAD, 0).at, width);
        // SAFETY: the caller's promise; packed memory is another's.
        unsafe { row.as_mut_ptr().copy_from_nonoverlapping(b.part(k, 0).at, width) };
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
