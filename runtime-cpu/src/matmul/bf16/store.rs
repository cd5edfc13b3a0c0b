//! Finished sums, rounded into the output.

use std::arch::x86_64::*;

use super::{SIDE, Tile, pack::PAIR};
use crate::matmul::Matrix;

/// A block of 32 × 32 sums, in `[2, 2]` tiles, as far as there are rows and columns; added to what is there if `add`.
///
/// # Safety
/// The output's rows and columns are there, and nothing else sees them; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn block(sums: *const Tile, out: Matrix<*mut u16>, [rows, columns]: [usize; 2], add: bool) {
    for i in 0..rows {
        let tiles = sums.wrapping_add(i / SIDE * 2).cast::<f32>().wrapping_add(i % SIDE * SIDE);
        let to = out.part(i, 0);
        // SAFETY: the caller's promise.
        unsafe {
            let sums = [0, SIDE * SIDE].map(|at| _mm512_load_ps(tiles.add(at)));
            if to.column == 1 {
                line(sums, to.at, columns, add);
            } else {
                scatter(sums, to, columns, add);
            }
        }
    }
}

/// So many of 32 numbers side by side.
///
/// # Safety
/// As for [`block`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn line(mut sums: [__m512; 2], to: *mut u16, there: usize, add: bool) {
    let mask = u32::MAX >> (PAIR - there);
    // SAFETY: the caller's promise; bf16 are a register's bits.
    unsafe {
        if add {
            let old = _mm512_maskz_loadu_epi16(mask, to.cast());
            let halves = [_mm512_castsi512_si256(old), _mm512_extracti64x4_epi64::<1>(old)];
            for (sum, old) in sums.iter_mut().zip(halves) {
                let old = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(old));
                *sum = _mm512_add_ps(*sum, _mm512_castsi512_ps(old));
            }
        }
        let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(sums[1], sums[0]));
        _mm512_mask_storeu_epi16(to.cast(), mask, rounded);
    }
}

/// Neighbours in a row lie apart.
///
/// # Safety
/// As for [`block`].
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
