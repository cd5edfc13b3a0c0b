//! Packs B into micro-panels, in the order in which the micro-kernel reads them: panel by panel, and row by row within
//! a panel.

use super::{macro_kernel::Blocking, matrix::Matrix, vector::Vectors, widen::widen};
use crate::{
    Simd,
    element::{Lane, Stored},
    simd::transpose,
};

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// Packs `[kc, nc]` elements of `b` into micro-panels, and upcasts those of half precision. Columns that fill up a
/// panel are zero. `to` has `kc` times `nc` elements, with `nc` rounded up to whole vectors.
///
/// # Safety
/// `b` is valid for reads of `[kc, nc]` elements.
pub(super) unsafe fn pack_b<S: Stored<Lane: Vectors>>(
    simd: Simd,
    blocking: Blocking,
    b: Matrix<*const S>,
    (kc, nc): (usize, usize),
    to: &mut [S::Lane],
) {
    if S::IS_LANE {
        // SAFETY: the caller guarantees `b`, whose elements are of the type they are packed in.
        return unsafe { pack_lanes(simd, blocking, b.cast(), (kc, nc), to) };
    }
    let mut j = 0;
    while j < nc {
        let width = blocking.panel_width(nc - j);
        let columns = width.min(nc - j);
        let to = &mut to[j * kc..][..width * kc];
        // SAFETY: columns `j..j + columns` are among the `nc` for which the caller guarantees `b`; `to` has `width`
        // elements for each row.
        unsafe { widen(simd, b.offset(0, j), (kc, columns), (to.as_mut_ptr(), width)) };
        if columns < width {
            to.chunks_exact_mut(width).for_each(|row| row[columns..].fill(S::Lane::ZERO));
        }
        j += width;
    }
}

/// Packs elements of the type they are packed in.
///
/// # Safety
/// As for [`pack_b`].
unsafe fn pack_lanes<T: Vectors>(
    simd: Simd,
    blocking: Blocking,
    b: Matrix<*const T>,
    (kc, nc): (usize, usize),
    to: &mut [T],
) {
    let mut j = 0;
    if b.column == 1 {
        let (panels, width) = (blocking.full_panels(nc), blocking.nv * blocking.lanes);
        // SAFETY: the full panels' columns are among the `nc` for which the caller guarantees `b`.
        unsafe { copy(b, (kc, panels, width), to) };
        j = panels * width;
    }
    while j < nc {
        let width = blocking.panel_width(nc - j);
        let columns = width.min(nc - j);
        let to = &mut to[j * kc..][..width * kc];
        // SAFETY: columns `j..j + columns` are among the `nc` for which the caller guarantees `b`; `to` has `width`
        // elements for each row.
        unsafe {
            match (b.offset(0, j), columns == width) {
                (b, true) if b.column == 1 => copy(b, (kc, 1, width), to),
                (b, true) if b.row == 1 => {
                    let row_bytes = (width * size_of::<T>()) as isize;
                    let from = (b.at.cast_mut().cast(), b.column * size_of::<T>() as isize);
                    transpose::<T>(simd, (to.as_mut_ptr().cast(), row_bytes), from, (kc, width));
                }
                (b, _) => gather(b, width, columns, to),
            }
        }
        j += width;
    }
}

/// Packs full panels of a row-major B: all panels of a row, then the next row. (Panel by panel, short stretches of rows
/// a power of two apart evict each other from L1: up to 3 % of a GEMM of 1024³. With software prefetches the copy takes
/// 1.1 times as long as with the hardware's alone.)
///
/// # Safety
/// `b` has unit column stride and is valid for `kc` rows of `panels · width` columns, for `size = (kc, panels, width)`.
unsafe fn copy<T: Vectors>(b: Matrix<*const T>, size: (usize, usize, usize), to: &mut [T]) {
    // SAFETY: the caller guarantees each row's `width` elements; `to` is a mutable slice, so nothing overlaps it.
    unsafe {
        match size.2 * size_of::<T>() {
            // With a copy of the constant size of a cache line no function is called: the call takes as long as the
            // copy.
            CACHE_LINE => {
                rows(b, size, to, |to, from| to.cast::<[u8; CACHE_LINE]>().copy_from_nonoverlapping(from.cast(), 1))
            }
            _ => rows(b, size, to, |to, from| to.copy_from_nonoverlapping(from, size.2)),
        }
    }
}

/// Calls `copy` with the destination and the source of each row of each panel.
#[inline(always)]
fn rows<T: Vectors>(
    b: Matrix<*const T>,
    (kc, panels, width): (usize, usize, usize),
    to: &mut [T],
    copy: impl Fn(*mut T, *const T),
) {
    for k in 0..kc {
        for panel in 0..panels {
            let to = &mut to[(panel * kc + k) * width..][..width];
            copy(to.as_mut_ptr(), b.offset(k, panel * width).at);
        }
    }
}

/// Packs a panel of which `columns` exist, from a matrix of any strides.
///
/// # Safety
/// `b` is valid for `columns` columns of as many rows as `to` has.
unsafe fn gather<T: Vectors>(b: Matrix<*const T>, width: usize, columns: usize, to: &mut [T]) {
    for (k, row) in to.chunks_exact_mut(width).enumerate() {
        for (j, x) in row[..columns].iter_mut().enumerate() {
            // SAFETY: row `k` and column `j < columns`, for which the caller guarantees `b`.
            *x = unsafe { *b.offset(k, j).at };
        }
        row[columns..].fill(T::ZERO);
    }
}
