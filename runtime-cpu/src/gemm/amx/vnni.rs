//! The VNNI layout: a 32-bit lane of a tile holds a pair of elements along `k`, of one row of A or one column of B.
//!
//! A pair of bf16 is two adjacent elements, as in a row in memory. A pair of `f32`, whose elements take a lane each, is
//! one lane of two vectors, 16 elements apart. So no term ever leaves its lane. (With adjacent pairs half of the
//! packing instructions moved terms between lanes, all of them on one port of the CPU. Attention took 1.05 to 1.1 times
//! as long.)

use std::arch::x86_64::*;

use super::{
    TILE_DIM,
    split::{LOW, round_bf16, split},
};

/// The two indices along `k`, of 32, that are stored as pair `pair`.
pub(super) const fn k_pair(pair: usize, terms: usize) -> [usize; 2] {
    if terms == 1 { [2 * pair, 2 * pair + 1] } else { [pair, pair + TILE_DIM] }
}

/// Splits 32 elements along `k`: a row of one tile for each term.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn split_row<const TERMS: usize>(row: [__m512; 2]) -> [__m512i; TERMS] {
    if TERMS == 1 { [round_bf16(row); TERMS] } else { split_pairs(row) }
}

/// Splits and pairs two rows of 16 columns: a row of one tile for each term.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn split_pairs<const TERMS: usize>(rows: [__m512; 2]) -> [__m512i; TERMS] {
    if TERMS == 1 {
        return [interleave(round_bf16(rows)); TERMS];
    }
    let [low, high] = [split::<TERMS>(rows[0]), split::<TERMS>(rows[1])];
    std::array::from_fn(|term| merge_halves(_mm512_srli_epi32::<16>(low[term]), high[term]))
}

/// The two rows of 32 columns whose pairs `left` and `right` hold, 16 columns each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn unpair_rows<const TERMS: usize>([left, right]: [__m512i; 2]) -> [__m512i; 2] {
    let rows = [
        merge_halves(_mm512_and_si512(left, _mm512_set1_epi32(LOW)), _mm512_slli_epi32::<16>(right)),
        merge_halves(_mm512_srli_epi32::<16>(left), right),
    ];
    if TERMS == 1 { rows.map(|row| deinterleave(row)) } else { rows }
}

/// Merges the first elements of pairs, with zeros in the lower bits, with the second ones, whose lower 16 bits are
/// ignored.
#[inline]
#[target_feature(enable = "avx512f")]
fn merge_halves(first: __m512i, second: __m512i) -> __m512i {
    const OR_AND: i32 = 0xf8;
    _mm512_ternarylogic_epi32::<OR_AND>(first, second, _mm512_set1_epi32(!LOW))
}

/// The index of an element in a row of 32, for each position in 16 pairs.
const INTERLEAVED: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[i] = (i / 2 + i % 2 * TILE_DIM) as u16;
        i += 1;
    }
    order
};

/// The index of an element in 16 pairs, for each position in a row of 32.
const DEINTERLEAVED: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[INTERLEAVED[i] as usize] = i as u16;
        i += 1;
    }
    order
};

/// Pairs element `i` of 32 with element `i + 16`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn interleave(row: __m512i) -> __m512i {
    _mm512_permutexvar_epi16(order(&INTERLEAVED), row)
}

/// The inverse of [`interleave`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn deinterleave(pairs: __m512i) -> __m512i {
    _mm512_permutexvar_epi16(order(&DEINTERLEAVED), pairs)
}

/// Pairs two rows of 32 elements as 32 pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn interleave_rows(low: __m512i, high: __m512i) -> [__m512i; 2] {
    const ORDER: [[u16; 32]; 2] = {
        let mut order = [[0; 32]; 2];
        let mut i = 0;
        while i < 64 {
            order[i / 32][i % 32] = (i / 2 + i % 2 * 32) as u16;
            i += 1;
        }
        order
    };
    [0, 1].map(|half| _mm512_permutex2var_epi16(low, order(&ORDER[half]), high))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn order(of: &[u16; 32]) -> __m512i {
    // SAFETY: the array has the size of the vector.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}
