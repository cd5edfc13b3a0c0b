//! Lines of 32 numbers as lines of tiles, in pieces.

use std::arch::x86_64::*;

use super::{SIDE, Tile, pack::PAIR, pieces::Pieces};
use crate::pointwise::turn_square;

/// A line of 32 steps of a row.
///
/// # Safety
/// The numbers lie there, and room for them; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn along<T: Pieces<P>, const P: usize>(from: *const T, ahead: isize, to: *mut __m512i) {
    ask(from.wrapping_offset(ahead));
    // SAFETY: the caller's promise.
    unsafe { row(T::read(from, u32::MAX), to) };
}

/// Lines of two steps, so far apart, of 32 columns.
///
/// # Safety
/// As for [`along`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn across<T: Pieces<P>, const P: usize>(
    from: *const T,
    apart: isize,
    ahead: isize,
    to: *mut __m512i,
) {
    let lines = [from, from.wrapping_offset(apart)];
    lines.into_iter().for_each(|line| ask(line.wrapping_offset(ahead)));
    // SAFETY: the caller's promise.
    unsafe { pair(lines.map(|line| T::read(line, u32::MAX)), to) };
}

/// The first of 32 numbers, so far apart: as many as there are, if those are less.
///
/// # Safety
/// They are there; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn line<T: Pieces<P>, const P: usize>(at: *const T, apart: isize, count: usize) -> [__m512i; P] {
    // SAFETY: the caller's promise.
    unsafe {
        match (apart, count) {
            (1, PAIR..) => T::read(at, u32::MAX),
            (1, _) => T::read(at, (1 << count) - 1),
            _ => {
                let mut some = [T::store(0.0); PAIR];
                for (i, to) in some.iter_mut().enumerate().take(count) {
                    *to = *at.offset(i as isize * apart);
                }
                T::read(some.as_ptr(), u32::MAX)
            }
        }
    }
}

/// 32 steps of a row of a strip.
///
/// # Safety
/// Its line of the first tile lies at `to`, and those of other pieces behind it; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn row<const P: usize>(numbers: [__m512i; P], to: *mut __m512i) {
    for (piece, numbers) in numbers.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { *to.add(piece * PAIR) = numbers };
    }
}

/// Two steps of 32 columns of a panel: a line of two tiles.
///
/// # Safety
/// As for [`row`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pair<const P: usize>([low, high]: [[__m512i; P]; 2], to: *mut __m512i) {
    for (piece, (low, high)) in low.into_iter().zip(high).enumerate() {
        for (half, line) in interleave(low, high).into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *to.add(piece * PAIR + half * SIDE) = line };
        }
    }
}

/// Two lines of 32 numbers as 32 pairs, in two registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn interleave(low: __m512i, high: __m512i) -> [__m512i; 2] {
    const fn order(from: i16) -> [i16; 32] {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i as usize] = from + i / 2 + i % 2 * 32;
            i += 1;
        }
        order
    }
    const ORDER: [[i16; 32]; 2] = [order(0), order(16)];
    // SAFETY: an array of a register's size.
    ORDER.map(|order| unsafe { _mm512_permutex2var_epi16(low, _mm512_loadu_si512(order.as_ptr().cast()), high) })
}

/// Pairs of a tile's lines as its columns.
///
/// # Safety
/// The tile lies there; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn turn_tile(tile: *mut Tile) {
    let tile = tile.cast::<[__m512i; SIDE]>();
    // SAFETY: the caller's promise.
    unsafe { tile.write(turn_square(tile.read())) };
}

/// Asks for a line that will be read later.
#[inline]
fn ask<T>(line: *const T) {
    for at in (0..PAIR * size_of::<T>()).step_by(64) {
        // SAFETY: it never faults, whatever lies there.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.wrapping_byte_add(at).cast()) };
    }
}
