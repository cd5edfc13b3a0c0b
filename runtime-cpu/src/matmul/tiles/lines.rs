//! Lines of 32 numbers as lines of tiles, in pieces.

use std::arch::x86_64::*;

use super::{SIDE, Tile, pack::PAIR, pieces::Pieces};
use crate::pointwise::read_turned;

/// A line of 32 steps of a row.
///
/// # Safety
/// The numbers lie there, and room for them; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn along<T: Pieces<P>, const P: usize>(from: *const T, ahead: isize, to: *mut __m512i) {
    ask(from.wrapping_offset(ahead));
    // SAFETY: the caller's promise.
    unsafe { row(T::row(T::read(from, u32::MAX)), to) };
}

/// Lines of a pair of steps, so far apart, of 32 columns.
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
    unsafe { pair(T::pair(lines.map(|line| T::read(line, u32::MAX))), to) };
}

/// The first of 32 numbers, so far apart: as many as there are, if those are less.
///
/// # Safety
/// They are there; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn line<T: Pieces<P>, const P: usize>(at: *const T, apart: isize, count: usize) -> T::Line {
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

/// A pair of steps of 32 columns of a panel: a line of two tiles.
///
/// # Safety
/// As for [`row`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pair<const P: usize>(numbers: [[__m512i; 2]; P], to: *mut __m512i) {
    for (piece, halves) in numbers.into_iter().enumerate() {
        for (half, line) in halves.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *to.add(piece * PAIR + half * SIDE) = line };
        }
    }
}

/// Pairs of a tile's lines as its columns.
///
/// # Safety
/// The tile lies there; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn turn_tile(tile: *mut Tile) {
    // SAFETY: the caller's promise.
    unsafe { tile.cast::<[__m512i; SIDE]>().write(read_turned(tile.cast(), size_of::<__m512i>() as isize)) };
}

/// Asks for a line that will be read later.
#[inline]
pub(super) fn ask<T>(line: *const T) {
    for at in (0..PAIR * size_of::<T>()).step_by(64) {
        // SAFETY: it never faults, whatever lies there.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.wrapping_byte_add(at).cast()) };
    }
}
