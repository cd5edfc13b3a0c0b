//! Finished sums, rounded into the output.

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::{SIDE, Tile, pack::PAIR};
use crate::matmul::{Epilogue, Matrix};

/// A block of 32 × 32 sums, in `[2, 2]` tiles, as far as there are rows and columns, and what the epilogue adds.
///
/// # Safety
/// The output's rows and columns are there, and those of what is added, and nothing else sees the output; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn block(
    sums: *const Tile,
    out: Matrix<*mut u16>,
    [rows, columns]: [usize; 2],
    epilogue: Epilogue<u16>,
) {
    let old = Matrix { at: out.at.cast_const(), row: out.row, column: out.column };
    let [first, second] = epilogue.plus;
    let terms: SmallVec<[_; 3]> = [epilogue.add.then_some(old), first, second].into_iter().flatten().collect();
    let in_lines = out.column == 1 && terms.iter().all(|x| x.column == 1);
    for i in 0..rows {
        let tiles = sums.wrapping_add(i / SIDE * 2).cast::<f32>().wrapping_add(i % SIDE * SIDE);
        // SAFETY: the caller's promise.
        unsafe {
            let sums = [0, SIDE * SIDE].map(|at| _mm512_load_ps(tiles.add(at)));
            if in_lines {
                line(sums, out.part(i, 0).at, terms.iter().map(|x| x.part(i, 0).at), columns);
            } else {
                scattered(sums, out.part(i, 0), terms.iter().map(|x| x.part(i, 0)), columns);
            }
        }
    }
}

/// So many of 32 numbers side by side, and those of each term.
///
/// # Safety
/// As for [`block`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn line(mut sums: [__m512; 2], to: *mut u16, terms: impl Iterator<Item = *const u16>, columns: usize) {
    let mask = u32::MAX >> (PAIR - columns);
    // SAFETY: the caller's promise; bf16 are a register's bits, and the upper ones of `f32`.
    unsafe {
        for x in terms {
            let x = _mm512_maskz_loadu_epi16(mask, x.cast());
            let halves = [_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64::<1>(x)];
            for (sum, x) in sums.iter_mut().zip(halves) {
                let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x));
                *sum = _mm512_add_ps(*sum, _mm512_castsi512_ps(wide));
            }
        }
        let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(sums[1], sums[0]));
        _mm512_mask_storeu_epi16(to.cast(), mask, rounded);
    }
}

/// Numbers that lie apart, or those of a term: by way of lines of their own.
///
/// # Safety
/// As for [`block`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn scattered(
    sums: [__m512; 2],
    to: Matrix<*mut u16>,
    terms: impl Iterator<Item = Matrix<*const u16>>,
    columns: usize,
) {
    let mut made = [0u16; PAIR];
    // SAFETY: the caller's promise.
    unsafe {
        let lines: SmallVec<[[u16; PAIR]; 3]> =
            terms.map(|x| std::array::from_fn(|j| if j < columns { *x.part(0, j).at } else { 0 })).collect();
        line(sums, made.as_mut_ptr(), lines.iter().map(|x| x.as_ptr()), columns);
        made[..columns].iter().enumerate().for_each(|(j, x)| *to.part(0, j).at = *x);
    }
}
