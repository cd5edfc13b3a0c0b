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
    let old = Matrix { at: out.at.cast_const(), row: out.row, column: out.column };
    let [first, second] = epilogue.plus;
    let mut terms = [old; 3];
    let mut count = 0;
    for x in [epilogue.add.then_some(old), first, second].into_iter().flatten() {
        terms[count] = x;
        count += 1;
    }
    let in_lines = out.column == 1 && terms[..count].iter().all(|x| x.column == 1);
    for i in 0..rows {
        let line_of = sums.wrapping_add(i / SIDE * 2).cast::<f32>().wrapping_add(i % SIDE * SIDE);
        let (to, terms) = (out.part(i, 0), terms.map(|x| x.part(i, 0)));
        let [a, b, c] = terms.map(|x| x.at);
        // SAFETY: the caller's promise.
        unsafe {
            match count {
                _ if !in_lines => scattered(line_of, to, &terms[..count], columns),
                0 => line(line_of, to.at, [], columns),
                1 => line(line_of, to.at, [a], columns),
                2 => line(line_of, to.at, [a, b], columns),
                _ => line(line_of, to.at, [a, b, c], columns),
            }
        }
    }
}

/// A row whose numbers are neighbours, and those of each term.
///
/// # Safety
/// As for [`rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn line<const TERMS: usize>(sums: *const f32, to: *mut u16, terms: [*const u16; TERMS], columns: usize) {
    for j in (0..columns).step_by(PAIR) {
        let mask = u32::MAX >> (PAIR - PAIR.min(columns - j));
        // SAFETY: the caller's promise; bf16 are a register's bits, and the upper ones of `f32`.
        unsafe {
            let mut sums = [0, SIDE * SIDE].map(|at| _mm512_load_ps(sums.add(j / PAIR * 4 * SIDE * SIDE + at)));
            for x in terms {
                let x = _mm512_maskz_loadu_epi16(mask, x.add(j).cast());
                let halves = [_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64::<1>(x)];
                for (sum, x) in sums.iter_mut().zip(halves) {
                    let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x));
                    *sum = _mm512_add_ps(*sum, _mm512_castsi512_ps(wide));
                }
            }
            let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(sums[1], sums[0]));
            _mm512_mask_storeu_epi16(to.add(j).cast(), mask, rounded);
        }
    }
}

/// A row whose numbers lie apart, or those of a term: by way of lines of its own.
///
/// # Safety
/// As for [`rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn scattered(sums: *const f32, to: Matrix<*mut u16>, terms: &[Matrix<*const u16>], columns: usize) {
    for j in (0..columns).step_by(PAIR) {
        let there = PAIR.min(columns - j);
        let sums = sums.wrapping_add(j / PAIR * 4 * SIDE * SIDE);
        let mut aside = [[0u16; PAIR]; 4];
        // SAFETY: the caller's promise.
        unsafe {
            for (x, aside) in terms.iter().zip(&mut aside) {
                aside[..there].iter_mut().enumerate().for_each(|(q, y)| *y = *x.part(0, j + q).at);
            }
            let [a, b, c, mut made] = aside;
            match terms.len() {
                0 => line(sums, made.as_mut_ptr(), [], there),
                1 => line(sums, made.as_mut_ptr(), [a.as_ptr()], there),
                2 => line(sums, made.as_mut_ptr(), [&a, &b].map(|x| x.as_ptr()), there),
                _ => line(sums, made.as_mut_ptr(), [&a, &b, &c].map(|x| x.as_ptr()), there),
            }
            made[..there].iter().enumerate().for_each(|(q, x)| *to.part(0, j + q).at = *x);
        }
    }
}
