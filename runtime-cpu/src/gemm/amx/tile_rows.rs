//! Rows of 32 elements as rows of tiles, split into terms.

use std::arch::x86_64::*;

use super::{TILE_DIM, Tile, pack_tiles::PANEL, split::SplitBf16};
use crate::simd::read_transposed;

/// Packs 32 elements along `k` of one row of A, or of one column of B.
///
/// # Safety
/// `from` is valid for 32 elements, and `to` for the row in the tiles of every term. The CPU supports AVX-512 BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn pack_along_k<T: SplitBf16<TERMS>, const TERMS: usize>(
    from: *const T,
    prefetch: isize,
    to: *mut __m512i,
) {
    prefetch_row(from.wrapping_offset(prefetch));
    // SAFETY: the caller guarantees 32 elements and the rows of tiles.
    unsafe { store_row(T::pack_row(T::load_32(from, u32::MAX)), to) };
}

/// Packs a pair along `k`, `stride` elements apart, of 32 columns of B, or of 32 rows of A.
///
/// # Safety
/// `from` is valid for 32 elements, and again `stride` elements later; `to` for the row in two tiles of every term. The
/// CPU supports AVX-512 BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn pack_across_k<T: SplitBf16<TERMS>, const TERMS: usize>(
    from: *const T,
    stride: isize,
    prefetch: isize,
    to: *mut __m512i,
) {
    let rows = [from, from.wrapping_offset(stride)];
    rows.into_iter().for_each(|row| prefetch_row(row.wrapping_offset(prefetch)));
    // SAFETY: the caller guarantees both rows of 32 elements and the rows of tiles.
    unsafe { store_pair(T::pack_pair(rows.map(|row| T::load_32(row, u32::MAX))), to) };
}

/// Loads `count` elements, at most 32, that are `stride` apart. The others of the 32 are zero.
///
/// # Safety
/// `at` is valid for `count` elements, `stride` apart. The CPU supports AVX-512 BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn load_row<T: SplitBf16<TERMS>, const TERMS: usize>(
    at: *const T,
    stride: isize,
    count: usize,
) -> T::Row {
    // SAFETY: the caller guarantees `count` elements; masked ones are not read.
    unsafe {
        match (stride, count) {
            (1, PANEL..) => T::load_32(at, u32::MAX),
            (1, _) => T::load_32(at, (1 << count) - 1),
            _ => {
                let mut some = [T::store(0.0); PANEL];
                for (i, to) in some.iter_mut().enumerate().take(count) {
                    *to = *at.offset(i as isize * stride);
                }
                T::load_32(some.as_ptr(), u32::MAX)
            }
        }
    }
}

/// Stores 32 elements along `k`: a row of one tile for each term.
///
/// # Safety
/// `to` is the row in the first term's tile, and valid in those of the other terms. The CPU supports AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store_row<const TERMS: usize>(elements: [__m512i; TERMS], to: *mut __m512i) {
    for (term, elements) in elements.into_iter().enumerate() {
        // SAFETY: the caller guarantees the row in every term's tile.
        unsafe { *to.add(term * PANEL) = elements };
    }
}

/// Stores pairs of 32 columns: a row of two tiles for each term.
///
/// # Safety
/// `to` is the row in the first term's first tile, and valid in all tiles of the terms. The CPU supports AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store_pair<const TERMS: usize>(elements: [[__m512i; 2]; TERMS], to: *mut __m512i) {
    for (term, halves) in elements.into_iter().enumerate() {
        for (half, row) in halves.into_iter().enumerate() {
            // SAFETY: the caller guarantees the row in both tiles of every term.
            unsafe { *to.add(term * PANEL + half * TILE_DIM) = row };
        }
    }
}

/// Transposes a tile of pairs in place.
///
/// # Safety
/// `tile` is valid for reads and writes. The CPU supports AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn transpose_tile(tile: *mut Tile) {
    // SAFETY: the caller guarantees the tile, which is 16 rows of 64 bytes.
    unsafe { tile.cast::<[__m512i; TILE_DIM]>().write(read_transposed(tile.cast(), size_of::<__m512i>() as isize)) };
}

/// Prefetches a row of 32 elements into L2.
#[inline]
pub(super) fn prefetch_row<T>(row: *const T) {
    for at in (0..PANEL * size_of::<T>()).step_by(64) {
        // SAFETY: a prefetch never faults, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(row.wrapping_byte_add(at).cast()) };
    }
}
