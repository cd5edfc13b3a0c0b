//! Finished sums, rounded into the output.

use std::arch::x86_64::*;

use super::{SIDE, Tile, pack::PAIR};
use crate::matmul::Matrix;

/// Rows of a strip, whose sums lie in `[columns / 32, 2, 2]` tiles; added to what is there if `add`.
///
/// # Safety
/// The output's rows and columns are there, and nothing else sees them; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16")]
pub(super) unsafe fn rows(sums: *const Tile, out: Matrix<*mut u16>, rows: usize, columns: usize, add: bool) {
    for i in 0..rows {
        for j in (0..columns).step_by(SIDE) {
            let tile = sums.wrapping_add(j / PAIR * 4 + i / SIDE * 2 + j % PAIR / SIDE);
            let there = SIDE.min(columns - j);
            let to = out.part(i, j);
            // SAFETY: the caller's promise.
            unsafe {
                let sum = _mm512_load_ps(tile.cast::<f32>().add(i % SIDE * SIDE));
                if to.column == 1 {
                    let mask = (0xffff_u32 >> (SIDE - there)) as __mmask16;
                    let old = if add { wide(_mm256_maskz_loadu_epi16(mask, to.at.cast())) } else { _mm512_setzero_ps() };
                    let sum = if add { _mm512_add_ps(sum, old) } else { sum };
                    _mm256_mask_storeu_epi16(to.at.cast(), mask, round(sum));
                } else {
                    scatter(sum, to, there, add);
                }
            }
        }
    }
}

/// Neighbours in a row lie apart.
///
/// # Safety
/// As for [`rows`].
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16")]
unsafe fn scatter(mut sum: __m512, to: Matrix<*mut u16>, there: usize, add: bool) {
    let mut line = [0u16; SIDE];
    // SAFETY: the caller's promise.
    unsafe {
        if add {
            for (j, x) in line[..there].iter_mut().enumerate() {
                *x = *to.part(0, j).at;
            }
            sum = _mm512_add_ps(sum, wide(_mm256_loadu_si256(line.as_ptr().cast())));
        }
        _mm256_storeu_si256(line.as_mut_ptr().cast(), round(sum));
        for (j, x) in line[..there].iter().enumerate() {
            *to.part(0, j).at = *x;
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn wide(x: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn round(x: __m512) -> __m256i {
    // SAFETY: both are a register's bits.
    unsafe { std::mem::transmute(_mm512_cvtneps_pbh(x)) }
}
