//! Columns of the right operand in the order in which tiles read them: panel after panel, a panel's rows one after the other.

use super::{factor::Matrix, kernel::Shape, register::Registers};
use crate::{Simd, pointwise::turn};

/// Bytes of a cache line.
const LINE: usize = 64;

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
/// that lie a power of two apart sweep each other out of the first cache: up to 3 % of a product of 1024³. Rows that are asked for
/// some time ahead come later than those that the processor foresees: it copies them in 1.1 times the time.)
///
/// # Safety
/// As for [`pack`].
unsafe fn copy<T: Registers>(b: Matrix<*const T>, size: (usize, usize, usize), to: &mut [T]) {
    // SAFETY: the caller's promise; packed memory is another's.
    unsafe {
        match size.2 * size_of::<T>() {
            // A call for each cache line takes as long as the copy.
            LINE => rows(b, size, to, |to, from| to.cast::<[u8; LINE]>().copy_from_nonoverlapping(from.cast(), 1)),
            _ => rows(b, size, to, |to, from| to.copy_from_nonoverlapping(from, size.2)),
        }
    }
}

/// Calls `copy` with where a row of a panel goes to and comes from.
#[inline(always)]
fn rows<T: Registers>(
    b: Matrix<*const T>,
    (depth, panels, width): (usize, usize, usize),
    to: &mut [T],
    copy: impl Fn(*mut T, *const T),
) {
    for k in 0..depth {
        for panel in 0..panels {
            let to = &mut to[(panel * depth + k) * width..][..width];
            copy(to.as_mut_ptr(), b.part(k, panel * width).at);
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
