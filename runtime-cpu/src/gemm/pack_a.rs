//! The A operand of a GEMM, whose micro-panels are read in place or packed.

use super::{matrix::Matrix, vector::Vectors};
use crate::simd::prefetch;

/// The A operand of a GEMM.
#[derive(Clone, Copy)]
pub(crate) enum AOperand<'a, T> {
    /// A matrix of any strides. Row-major ones are read in place, others are packed.
    Strided(Matrix<*const T>),
    /// A column-major matrix that is read in place, for blocks that are in cache. It has whole micro-panels of rows.
    Transposed(Matrix<*const T>),
    /// Element `(i, k)` is `rows[i] + columns[k]` elements from `at`: an im2col view, read in place.
    Gathered { at: *const T, rows: &'a [usize], columns: &'a [usize] },
}

impl<T> AOperand<'_, T> {
    /// The part from row `i` and column `k` on.
    pub(super) fn offset(self, i: usize, k: usize) -> Self {
        match self {
            AOperand::Strided(a) => AOperand::Strided(a.offset(i, k)),
            AOperand::Transposed(a) => AOperand::Transposed(a.offset(i, k)),
            AOperand::Gathered { at, rows, columns } => {
                AOperand::Gathered { at, rows: &rows[i..], columns: &columns[k..] }
            }
        }
    }
}

/// The elements of an A micro-panel of `MR` rows.
pub(super) trait AMicroPanel<T>: Copy {
    /// The address of the element in row `i` and column `k`.
    fn at(&self, i: usize, k: usize) -> *const T;
}

/// A panel with unit stride along each row: one pointer per row.
#[derive(Clone, Copy)]
pub(super) struct RowPanel<T, const MR: usize>(pub [*const T; MR]);

/// A packed panel: column by column, `MR` elements each.
#[derive(Clone, Copy)]
pub(super) struct PackedA<T, const MR: usize>(pub *const T);

/// A panel with unit stride along each column, and a column stride: a column-major matrix in place.
#[derive(Clone, Copy)]
pub(super) struct ColumnPanel<T, const MR: usize>(pub *const T, pub isize);

/// A panel of an im2col view in place: one pointer per row, and the offset of every column.
#[derive(Clone, Copy)]
pub(super) struct GatheredPanel<'a, T, const MR: usize>(pub [*const T; MR], pub &'a [usize]);

impl<T: Copy, const MR: usize> AMicroPanel<T> for RowPanel<T, MR> {
    #[inline(always)]
    fn at(&self, i: usize, k: usize) -> *const T {
        self.0[i].wrapping_add(k)
    }
}

impl<T: Copy, const MR: usize> AMicroPanel<T> for PackedA<T, MR> {
    #[inline(always)]
    fn at(&self, i: usize, k: usize) -> *const T {
        self.0.wrapping_add(k * MR + i)
    }
}

impl<T: Copy, const MR: usize> AMicroPanel<T> for ColumnPanel<T, MR> {
    #[inline(always)]
    fn at(&self, i: usize, k: usize) -> *const T {
        self.0.wrapping_offset(k as isize * self.1).wrapping_add(i)
    }
}

impl<T: Copy, const MR: usize> AMicroPanel<T> for GatheredPanel<'_, T, MR> {
    #[inline(always)]
    fn at(&self, i: usize, k: usize) -> *const T {
        self.0[i].wrapping_add(self.1[k])
    }
}

/// The number of columns between prefetching elements and reading them. Earlier layers have evicted them from L1 and
/// L2, and a GEMM visits many short stretches of memory, which hardware prefetchers do not foresee.
const PREFETCH_DISTANCE: usize = 16;

/// Packs `m` rows into micro-panels of `MR` rows: column by column, zeros where there is no row.
///
/// # Safety
/// `a` is valid for reads of `[m, kc]` elements, which the caller guarantees.
#[inline(always)]
pub(super) unsafe fn pack_a<T: Vectors, const MR: usize>(a: Matrix<*const T>, m: usize, kc: usize, packed_a: &mut [T]) {
    let whole = if a.row == 1 { m / MR * MR } else { 0 };
    for k in 0..kc {
        let from = a.offset(0, k);
        prefetch(a.offset(0, k + PREFETCH_DISTANCE).at, m);
        // SAFETY: `a` is valid for `m` rows, which the caller guarantees; a micro-panel has `kc` columns of `MR`
        // elements.
        unsafe {
            let to = packed_a.as_mut_ptr().add(k * MR);
            for i in (0..whole).step_by(MR) {
                to.add(i * kc).copy_from_nonoverlapping(from.at.add(i), MR);
            }
        }
    }
    for i in whole..m.next_multiple_of(MR) {
        let panel = &mut packed_a[i / MR * MR * kc..][..MR * kc];
        for (k, column) in panel.chunks_exact_mut(MR).enumerate() {
            // SAFETY: row `i < m` and column `k < kc` are `a`'s, which the caller guarantees to be valid.
            column[i % MR] = if i < m { unsafe { *a.offset(i, k).at } } else { T::ZERO };
        }
    }
}
