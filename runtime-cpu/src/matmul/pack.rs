//! Columns of the right operand in the order in which tiles read them: panel after panel, a panel's rows one after the other.

use super::{
    factor::Matrix,
    kernel::Shape,
    product::Line,
    register::Registers,
};
use crate::{Simd, pointwise::turn, simd::{prefetch, leveled}};

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
    let width = shape.registers * shape.lanes;
    let mut j = 0;
    if b.column == 1 && (width * size_of::<T>()).is_multiple_of(size_of::<Line>()) {
        let panels = columns / width;
        // (one register more is cut otherwise)
        let panels = if shape.panel(columns - (panels.max(1) - 1) * width) == width { panels } else { panels.saturating_sub(1) };
        // SAFETY: the caller's promise.
        copy(simd, b.at.cast(), b.row * size_of::<T>() as isize, (depth, panels, width * size_of::<T>()), to.as_mut_ptr().cast());
        j = panels * width;
    }
    while j < columns {
        let width = shape.panel(columns - j);
        let there = width.min(columns - j);
        let to = &mut to[j * depth..][..width * depth];
        // SAFETY: the caller's promise.
        unsafe {
            match (b.part(0, j), there == width) {
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

leveled! {
/// Full panels of rows whose numbers are neighbours, row after row.
fn copy(from: *const u8, row: isize, sizes: (usize, usize, usize), to: *mut u8) {
    let (depth, panels, width) = sizes;
    for k in 0..depth {
        let from = from.wrapping_offset(k as isize * row);
        prefetch(from.wrapping_offset(AHEAD as isize * row), panels * width);
        for p in 0..panels {
            for l in 0..width / size_of::<Line>() {
                let at = l * size_of::<Line>();
                unsafe {
                    let x = from.add(p * width + at).cast::<[u8; 64]>().read_unaligned();
                    to.add((p * depth + k) * width + at).cast::<[u8; 64]>().write_unaligned(x);
                }
            }
        }
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
