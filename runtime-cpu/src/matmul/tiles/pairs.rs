//! What lies side by side: a lane of a tile has two steps of a row or a column.
//!
//! Of bf16 those are neighbours, as rows lie in memory. Of `f32`, which have a lane each, they are the same lane of two registers, 16 steps apart: so no
//! piece ever leaves its lane. (With neighbours half of the instructions of packing moved pieces between lanes, all of them on one port of
//! the processor; attention took 1.05 to 1.1 times as long.)

use std::arch::x86_64::*;

use super::{
    SIDE,
    pieces::{LOW, cut, rounded},
};

/// The steps of a pair, of 32.
pub(super) const fn steps_of(pair: usize, pieces: usize) -> [usize; 2] {
    if pieces == 1 { [2 * pair, 2 * pair + 1] } else { [pair, pair + SIDE] }
}

/// 32 steps of a row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn row<const P: usize>(steps: [__m512; 2]) -> [__m512i; P] {
    if P == 1 { [rounded(steps); P] } else { pairs(steps) }
}

/// Two steps of 16 columns, side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn pairs<const P: usize>(steps: [__m512; 2]) -> [__m512i; P] {
    if P == 1 {
        return [in_pairs(rounded(steps)); P];
    }
    let [low, high] = [cut::<P>(steps[0]), cut::<P>(steps[1])];
    std::array::from_fn(|piece| merged(_mm512_srli_epi32::<16>(low[piece]), high[piece]))
}

/// Of pairs of rows, in columns 0 to 15 and 16 to 31, the rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn rows_of<const P: usize>([left, right]: [__m512i; 2]) -> [__m512i; 2] {
    let rows = [
        merged(_mm512_and_si512(left, _mm512_set1_epi32(LOW)), _mm512_slli_epi32::<16>(right)),
        merged(_mm512_srli_epi32::<16>(left), right),
    ];
    if P == 1 { rows.map(|row| in_line(row)) } else { rows }
}

/// The first numbers of pairs, where all else is zero, with the second ones, whatever is with them.
#[inline]
#[target_feature(enable = "avx512f")]
fn merged(first: __m512i, second: __m512i) -> __m512i {
    const OR_AND: i32 = 0xf8;
    _mm512_ternarylogic_epi32::<OR_AND>(first, second, _mm512_set1_epi32(!LOW))
}

/// Where the numbers of pairs are in a line of 32.
const PAIRS: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[i] = (i / 2 + i % 2 * SIDE) as u16;
        i += 1;
    }
    order
};

/// Where the numbers of a line are in 16 pairs.
const LINE: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[PAIRS[i] as usize] = i as u16;
        i += 1;
    }
    order
};

/// Number `i` of 32 beside number `i + 16`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn in_pairs(line: __m512i) -> __m512i {
    _mm512_permutexvar_epi16(order(&PAIRS), line)
}

/// What [`in_pairs`] undoes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn in_line(pairs: __m512i) -> __m512i {
    _mm512_permutexvar_epi16(order(&LINE), pairs)
}

/// Two lines of 32 numbers as 32 pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn interleaved(low: __m512i, high: __m512i) -> [__m512i; 2] {
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
    // SAFETY: an array of a register's size.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}
