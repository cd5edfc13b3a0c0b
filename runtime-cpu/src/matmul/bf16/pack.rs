//! Operands in tiles: 32 steps of 16 rows on the left; on the right 16 columns, two steps of a column side by side. What fills up a tile
//! is zero.

use std::arch::x86_64::*;

use super::{SIDE, STEP, Tile};
use crate::{matmul::Matrix, pointwise::turn_square};

/// Rows of a strip and columns of a panel: two tiles.
pub(super) const PAIR: usize = 2 * SIDE;

/// Where a strip of the left operand is read: its first number, and the bytes from a row to the next and from a step to the next.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub at: *const u16,
    pub line: isize,
    pub step: isize,
}

impl Strip {
    /// Rows that lie side by side in memory.
    pub(super) fn in_place(a: Matrix<*const u16>) -> Strip {
        let number = size_of::<u16>() as isize;
        Strip { at: a.at, line: a.row * number, step: STEP as isize * number }
    }

    /// Tiles of a strip.
    pub(super) fn packed(tiles: *const Tile) -> Strip {
        Strip { at: tiles.cast(), line: (size_of::<Tile>() / SIDE) as isize, step: 2 * size_of::<Tile>() as isize }
    }
}

/// Steps by 32, or less: a square of numbers, one line per row (left) or per step (right).
type Square = [[u16; STEP]; PAIR];

/// A strip of the left operand, `[depth / 32, 2]` tiles: `rows` of at most 32.
///
/// # Safety
/// The numbers lie in their operand; `to` has room; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn left(a: Matrix<*const u16>, rows: usize, depth: usize, to: *mut Tile) {
    let whole = depth / STEP * STEP;
    // SAFETY: the caller's promise.
    unsafe {
        if a.column == 1 {
            for r in 0..rows.next_multiple_of(SIDE) {
                // Rows that are not there have sums that nobody reads.
                let from = a.part(r.min(rows - 1), 0).at;
                let to = to.add(r / SIDE).cast::<__m512i>().add(r % SIDE);
                for k in (0..whole).step_by(STEP) {
                    *to.add(k * PAIR / STEP) = _mm512_loadu_si512(from.add(k).cast());
                }
            }
        }
        for k in (0..depth).step_by(STEP) {
            let (a, to) = (a.part(0, k), to.add(k / STEP * 2));
            match k < whole {
                true if a.column == 1 => {}
                true if a.row == 1 && rows == PAIR => turned(|k| a.part(0, k).at, to),
                _ => {
                    let square = corner(a, rows, STEP.min(depth - k));
                    (to.cast::<Square>()).write(square);
                }
            }
        }
    }
}

/// Columns of the right operand in panels, `[columns / 32, depth / 32, 2]` tiles.
///
/// # Safety
/// As for [`left`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn right(b: Matrix<*const u16>, depth: usize, columns: usize, to: *mut Tile) {
    let steps = depth.div_ceil(STEP);
    let tile = |j: usize, k: usize| to.wrapping_add((j / PAIR * steps + k / STEP) * 2);
    // SAFETY: the caller's promise.
    let square = |j: usize, k: usize| unsafe {
        let (b, to, there) = (b.part(k, j), tile(j, k), PAIR.min(columns - j));
        let whole = k + STEP <= depth;
        if b.row == 1 && whole {
            pairs(|j| b.part(0, j.min(there - 1)).at, to);
        } else if b.column == 1 && whole && there == PAIR {
            paired(|k| b.part(k, 0).at, to);
        } else {
            let square = corner(b, STEP.min(depth - k), there);
            paired(|k| square[k].as_ptr(), to);
        }
    };
    if b.row == 1 {
        (0..columns).step_by(PAIR).for_each(|j| (0..depth).step_by(STEP).for_each(|k| square(j, k)));
    } else {
        (0..depth).step_by(STEP).for_each(|k| (0..columns).step_by(PAIR).for_each(|j| square(j, k)));
    }
}

/// Any strides, and squares that are not full.
///
/// # Safety
/// The numbers lie in their operand.
unsafe fn corner(x: Matrix<*const u16>, rows: usize, columns: usize) -> Square {
    let mut to = [[0; STEP]; PAIR];
    for (i, line) in to[..rows].iter_mut().enumerate() {
        for (j, to) in line[..columns].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *to = unsafe { *x.part(i, j).at };
        }
    }
    to
}

/// Two lines of 32 numbers as 32 pairs, in two registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave(low: __m512i, high: __m512i) -> [__m512i; 2] {
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

/// Two tiles of the right operand from 32 lines of a step each.
///
/// # Safety
/// 32 numbers lie at each line.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn paired(line: impl Fn(usize) -> *const u16, to: *mut Tile) {
    for pair in 0..SIDE {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = [0, 1].map(|i| _mm512_loadu_si512(line(2 * pair + i).cast()));
            let [first, second] = interleave(low, high);
            *to.cast::<__m512i>().add(pair) = first;
            *to.add(1).cast::<__m512i>().add(pair) = second;
        }
    }
}

/// Two tiles of the right operand from 32 lines of a column each.
///
/// # Safety
/// As for [`paired`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pairs(line: impl Fn(usize) -> *const u16, to: *mut Tile) {
    for tile in 0..2 {
        // SAFETY: the caller's promise.
        unsafe {
            let lines = std::array::from_fn(|i| _mm512_loadu_si512(line(SIDE * tile + i).cast()));
            to.add(tile).cast::<[__m512i; SIDE]>().write(turn_square(lines));
        }
    }
}

/// Two tiles of the left operand from 32 lines of a step each.
///
/// # Safety
/// As for [`paired`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn turned(line: impl Fn(usize) -> *const u16, to: *mut Tile) {
    let mut halves = [[_mm512_setzero_si512(); SIDE]; 2];
    let [first, second] = &mut halves;
    for (pair, (first, second)) in first.iter_mut().zip(second).enumerate() {
        // SAFETY: the caller's promise.
        let [low, high] = unsafe { [0, 1].map(|i| _mm512_loadu_si512(line(2 * pair + i).cast())) };
        [*first, *second] = interleave(low, high);
    }
    for (tile, half) in halves.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { to.add(tile).cast::<[__m512i; SIDE]>().write(turn_square(half)) };
    }
}
