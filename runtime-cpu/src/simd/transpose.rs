//! Transposes matrices in square blocks that fit the vector registers, so that whole cache lines are read and written.

use crate::Simd;

/// Rows and columns of a block: a cache line of four-byte elements.
const BLOCK: usize = 16;

/// Computes `to[r][c] = from[c][r]` for `rows × columns` elements; `to` has unit stride along `c`, `from` along `r`.
/// With each address comes the stride of the other axis, in bytes.
///
/// # Safety
/// `to` is valid for writes of `[rows, columns]` elements and `from` for reads of `[columns, rows]`, aligned. Nothing
/// writes `from` during the call, and no other thread accesses `to`.
pub(crate) unsafe fn transpose<T: Copy>(
    simd: Simd,
    (to, to_row): (*mut u8, isize),
    (from, from_row): (*mut u8, isize),
    (rows, columns): (usize, usize),
) {
    let block = |r: usize, c: usize| {
        let to = to.wrapping_offset(r as isize * to_row).cast::<T>().wrapping_add(c);
        let from = from.wrapping_offset(c as isize * from_row).cast::<T>().wrapping_add(r);
        (to, from)
    };
    let whole = |n: usize| n / BLOCK * BLOCK;
    let wide = size_of::<T>() == 4 && simd >= Simd::Avx512;
    for r in (0..whole(rows)).step_by(BLOCK) {
        for c in (0..whole(columns)).step_by(BLOCK) {
            let (to, from) = block(r, c);
            // SAFETY: the block is within both matrices, which the caller guarantees; a runtime is only built with a
            // `Simd` that this CPU supports.
            unsafe {
                match wide {
                    #[cfg(target_arch = "x86_64")]
                    true => avx512(to.cast(), to_row, from.cast(), from_row),
                    _ => portable::<T>(to, to_row, from, from_row),
                }
            }
        }
    }
    let rest = |r: std::ops::Range<usize>, c: std::ops::Range<usize>| {
        for r in r {
            for c in c.clone() {
                let (to, from) = block(r, c);
                // SAFETY: row `r` and column `c` are within both matrices, which the caller guarantees.
                unsafe { *to = *from };
            }
        }
    };
    rest(0..whole(rows), whole(columns)..columns);
    rest(whole(rows)..rows, 0..columns);
}

/// Transposes one block: reads whole rows, writes them element by element.
///
/// # Safety
/// As for [`transpose`], for one block.
unsafe fn portable<T: Copy>(to: *mut T, to_row: isize, from: *const T, from_row: isize) {
    // SAFETY: the caller guarantees a whole block of both matrices.
    unsafe {
        let mut lines = [[*from; BLOCK]; BLOCK];
        for (c, row) in lines.iter_mut().enumerate() {
            *row = *from.wrapping_byte_offset(c as isize * from_row).cast();
        }
        for r in 0..BLOCK {
            let to = to.wrapping_byte_offset(r as isize * to_row);
            for (c, row) in lines.iter().enumerate() {
                *to.wrapping_add(c) = row[r];
            }
        }
    }
}

/// Transposes one block of four-byte elements; the portable form takes twice as long.
///
/// # Safety
/// As for [`transpose`], for one block, on a CPU with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(to: *mut u32, to_row: isize, from: *const u32, from_row: isize) {
    use std::arch::x86_64::*;
    // SAFETY: the caller guarantees a whole block of both matrices.
    unsafe {
        for (r, row) in read_transposed(from, from_row).into_iter().enumerate() {
            _mm512_storeu_si512(to.wrapping_byte_offset(r as isize * to_row).cast(), row);
        }
    }
}

/// Reads sixteen rows of sixteen words, `row_bytes` apart, and returns them transposed.
///
/// Quarters of rows are combined as they are read, which leaves blocks of four by four to be transposed. (From whole
/// rows all 64 steps, not 32, would be moves between lanes, for which the CPU has one port.)
///
/// # Safety
/// `from` is valid for reads of the sixteen rows. The CPU supports AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn read_transposed(from: *const u32, row_bytes: isize) -> [std::arch::x86_64::__m512i; BLOCK] {
    use std::arch::x86_64::*;
    let mut transposed = [_mm512_setzero_si512(); BLOCK];
    for (quarter, transposed) in transposed.chunks_exact_mut(4).enumerate() {
        let read = |row: usize| {
            let at = from.wrapping_byte_offset(row as isize * row_bytes).wrapping_add(4 * quarter);
            // SAFETY: a quarter of row `row` of the sixteen that the caller guarantees.
            unsafe { _mm_loadu_si128(at.cast()) }
        };
        let fourth = |row: usize| {
            let x = _mm512_castsi128_si512(read(row));
            let x = _mm512_inserti32x4::<1>(x, read(row + 4));
            let x = _mm512_inserti32x4::<2>(x, read(row + 8));
            _mm512_inserti32x4::<3>(x, read(row + 12))
        };
        let [a, b, c, d] = [fourth(0), fourth(1), fourth(2), fourth(3)];
        let [low, high] = [_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)];
        let [low2, high2] = [_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d)];
        transposed[0] = _mm512_unpacklo_epi64(low, low2);
        transposed[1] = _mm512_unpackhi_epi64(low, low2);
        transposed[2] = _mm512_unpacklo_epi64(high, high2);
        transposed[3] = _mm512_unpackhi_epi64(high, high2);
    }
    transposed
}
