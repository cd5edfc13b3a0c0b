//! Finished sums, rounded into the output.

use std::arch::x86_64::*;

use super::{SIDE, Tile, pack::PAIR};
use crate::matmul::{Epilogue, Matrix};

/// Rows of a strip, whose sums lie in `[columns / 32, 2, 2]` tiles, and what the epilogue adds.
///
/// # Safety
/// The output's rows and columns are there, and those of what is added, and nothing else sees the output; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn rows(
    sums: *const Tile,
    out: Matrix<*mut u16>,
    rows: usize,
    columns: usize,
    epilogue: Epilogue<u16>,
) {
    for i in 0..rows {
        for j in (0..columns).step_by(PAIR) {
            let there = PAIR.min(columns - j);
            let tiles = sums.wrapping_add(j / PAIR * 4 + i / SIDE * 2).cast::<f32>().wrapping_add(i % SIDE * SIDE);
            let to = out.part(i, j);
            // SAFETY: the caller's promise.
            unsafe {
                let mut sums = [0, SIDE * SIDE].map(|at| _mm512_load_ps(tiles.add(at)));
                for x in epilogue.part(i, j).plus.into_iter().flatten() {
                    sums = plus(sums, x, there);
                }
                if to.column == 1 {
                    line(sums, to.at, there, epilogue.add);
                } else {
                    scatter(sums, to, there, epilogue.add);
                }
            }
        }
    }
}

/// So many of 32 numbers side by side.
///
/// # Safety
/// As for [`rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn line(mut sums: [__m512; 2], to: *mut u16, there: usize, add: bool) {
    let mask = u32::MAX >> (PAIR - there);
    // SAFETY: the caller's promise; bf16 are a register's bits.
    unsafe {
        if add {
            sums = plus(sums, Matrix { at: to.cast_const(), row: 0, column: 1 }, there);
        }
        let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(sums[1], sums[0]));
        _mm512_mask_storeu_epi16(to.cast(), mask, rounded);
    }
}

/// The sums and so many of 32 numbers of a row.
///
/// # Safety
/// So many numbers lie there; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn plus(sums: [__m512; 2], x: Matrix<*const u16>, there: usize) -> [__m512; 2] {
    let mut aside = [0u16; PAIR];
    // SAFETY: the caller's promise; bf16 are the upper bits of `f32`.
    unsafe {
        let at = if x.column == 1 {
            x.at
        } else {
            aside[..there].iter_mut().enumerate().for_each(|(j, y)| *y = *x.part(0, j).at);
            aside.as_ptr()
        };
        let x = _mm512_maskz_loadu_epi16(u32::MAX >> (PAIR - there), at.cast());
        let halves = [_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64::<1>(x)];
        let wide = halves.map(|x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x))));
        [_mm512_add_ps(sums[0], wide[0]), _mm512_add_ps(sums[1], wide[1])]
    }
}

/// Neighbours in a row lie apart.
///
/// # Safety
/// As for [`rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn scatter(sums: [__m512; 2], to: Matrix<*mut u16>, there: usize, add: bool) {
    let mut aside = [0u16; PAIR];
    // SAFETY: the caller's promise.
    unsafe {
        if add {
            for (j, x) in aside[..there].iter_mut().enumerate() {
                *x = *to.part(0, j).at;
            }
        }
        line(sums, aside.as_mut_ptr(), PAIR, add);
        for (j, x) in aside[..there].iter().enumerate() {
            *to.part(0, j).at = *x;
        }
    }
}
