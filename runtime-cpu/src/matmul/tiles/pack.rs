//! Operands in tiles: 32 steps of 16 rows on the left; on the right 16 columns, two steps of a column side by side. What fills up a tile
//! is zero. Of numbers in pieces, the tiles of the first pieces come first.

use std::arch::x86_64::*;

use half::bf16;

use super::{SIDE, STEP, Tile, pieces::Pieces};
use crate::{matmul::Matrix, pointwise::turn_square};

/// Rows of a strip and columns of a panel: two tiles.
pub(super) const PAIR: usize = 2 * SIDE;

/// Where a strip of the left operand is read: its first number, and the bytes from a row to the next and from a step to the next.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub at: *const bf16,
    pub line: isize,
    pub step: isize,
}

impl Strip {
    /// Rows of bf16 whose numbers lie side by side in memory.
    pub(super) fn in_place<T>(a: Matrix<*const T>) -> Strip {
        let number = size_of::<bf16>() as isize;
        Strip { at: a.at.cast(), line: a.row * number, step: STEP as isize * number }
    }

    /// The strip that begins so many tiles of steps later.
    pub(super) fn part(self, step: usize) -> Strip {
        Strip { at: self.at.wrapping_byte_offset(step as isize * self.step), ..self }
    }

    /// Tiles of a strip, of so many pieces.
    pub(super) fn packed(tiles: *const Tile, pieces: usize) -> Strip {
        Strip {
            at: tiles.cast(),
            line: (size_of::<Tile>() / SIDE) as isize,
            step: (2 * pieces * size_of::<Tile>()) as isize,
        }
    }
}

/// Steps by 32, or less: a square of numbers, one line per row (left) or per step (right).
type Square<T> = [[T; STEP]; PAIR];

/// A strip of the left operand, `[depth / 32, P, 2]` tiles: `rows` of at most 32.
///
/// # Safety
/// The numbers lie in their operand; `to` has room; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn left<T: Pieces<P>, const P: usize>(a: Matrix<*const T>, rows: usize, depth: usize, to: *mut Tile) {
    let whole = depth / STEP * STEP;
    // SAFETY: the caller's promise.
    unsafe {
        if a.column == 1 {
            for r in 0..rows.next_multiple_of(SIDE) {
                // Rows that are not there have sums that nobody reads.
                let from = a.part(r.min(rows - 1), 0).at;
                for k in (0..whole).step_by(STEP) {
                    row::<T, P>(from.add(k), r, to.add(k / STEP * 2 * P));
                }
            }
        }
        for k in (0..depth).step_by(STEP) {
            let (a, to) = (a.part(0, k), to.add(k / STEP * 2 * P));
            match k < whole {
                true if a.column == 1 => {}
                true if a.row == 1 && rows == PAIR => turned::<T, P>(|k| a.part(0, k).at, to),
                _ => {
                    let square = corner(a, rows, STEP.min(depth - k));
                    for (r, line) in square.iter().enumerate() {
                        row::<T, P>(line.as_ptr(), r, to);
                    }
                }
            }
        }
    }
}

/// Parts of some tens of instructions that packing such a strip falls into: none, if it is packed at once alone.
pub(super) fn parts<T: Pieces<P>, const P: usize>(a: Matrix<*const T>, rows: usize, depth: usize) -> usize {
    let steps = depth / STEP;
    match (a.column, a.row) {
        _ if !depth.is_multiple_of(STEP) => 0,
        (1, _) => PAIR * steps,
        (_, 1) if rows == PAIR => (SIDE + 2 * P) * steps,
        _ => 0,
    }
}

/// One of them, in order.
///
/// # Safety
/// As for [`left`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn part<T: Pieces<P>, const P: usize>(
    a: Matrix<*const T>,
    (rows, depth): (usize, usize),
    to: *mut Tile,
    part: usize,
) {
    let tiles = |step: usize| to.wrapping_add(step * 2 * P);
    // SAFETY: the caller's promise.
    unsafe {
        if a.column == 1 {
            let (r, step) = (part / (depth / STEP), part % (depth / STEP));
            return row(a.part(r.min(rows - 1), step * STEP).at, r, tiles(step));
        }
        let (step, line) = (part / (SIDE + 2 * P), part % (SIDE + 2 * P));
        match line.checked_sub(SIDE) {
            None => pair(|k| a.part(0, step * STEP + k).at, line, tiles(step)),
            Some(tile) => turn_tile(tiles(step).add(tile)),
        }
    }
}

/// Columns of the right operand in panels, `[columns / 32, depth / 32, P, 2]` tiles.
///
/// # Safety
/// As for [`left`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn right<T: Pieces<P>, const P: usize>(
    b: Matrix<*const T>,
    depth: usize,
    columns: usize,
    to: *mut Tile,
) {
    let steps = depth.div_ceil(STEP);
    let tile = |j: usize, k: usize| to.wrapping_add((j / PAIR * steps + k / STEP) * 2 * P);
    // SAFETY: the caller's promise.
    let square = |j: usize, k: usize| unsafe {
        let (b, to, there) = (b.part(k, j), tile(j, k), PAIR.min(columns - j));
        let whole = k + STEP <= depth;
        if b.row == 1 && whole {
            pairs::<T, P>(|j| b.part(0, j.min(there - 1)).at, to);
        } else if b.column == 1 && whole && there == PAIR {
            paired::<T, P>(|k| b.part(k, 0).at, to);
        } else {
            let square = corner(b, STEP.min(depth - k), there);
            paired::<T, P>(|k| square[k].as_ptr(), to);
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
unsafe fn corner<T: Pieces<P>, const P: usize>(x: Matrix<*const T>, rows: usize, columns: usize) -> Square<T> {
    let mut to = [[T::store(0.0); STEP]; PAIR];
    for (i, line) in to[..rows].iter_mut().enumerate() {
        for (j, to) in line[..columns].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *to = unsafe { *x.part(i, j).at };
        }
    }
    to
}

/// 32 steps of row `r` of a strip.
///
/// # Safety
/// They lie at `from`, and the tiles of these steps at `to`; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn row<T: Pieces<P>, const P: usize>(from: *const T, r: usize, to: *mut Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        let to = to.add(r / SIDE).cast::<__m512i>().add(r % SIDE);
        for (piece, numbers) in T::read(from).into_iter().enumerate() {
            *to.add(piece * PAIR) = numbers;
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

/// Two tiles of the right operand, of each piece, from 32 lines of a step each.
///
/// # Safety
/// 32 numbers lie at each line.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn paired<T: Pieces<P>, const P: usize>(line: impl Fn(usize) -> *const T, to: *mut Tile) {
    for i in 0..SIDE {
        // SAFETY: the caller's promise.
        unsafe { pair(&line, i, to) };
    }
}

/// A line of those tiles: two steps.
///
/// # Safety
/// As for [`paired`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pair<T: Pieces<P>, const P: usize>(line: impl Fn(usize) -> *const T, i: usize, to: *mut Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        let [low, high] = [T::read(line(2 * i)), T::read(line(2 * i + 1))];
        for piece in 0..P {
            let [first, second] = interleave(low[piece], high[piece]);
            *to.add(2 * piece).cast::<__m512i>().add(i) = first;
            *to.add(2 * piece + 1).cast::<__m512i>().add(i) = second;
        }
    }
}

/// Two tiles of the right operand, of each piece, from 32 lines of a column each.
///
/// # Safety
/// As for [`paired`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pairs<T: Pieces<P>, const P: usize>(line: impl Fn(usize) -> *const T, to: *mut Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        (0..PAIR).for_each(|j| row(line(j), j, to));
        (0..2 * P).for_each(|tile| turn_tile(to.add(tile)));
    }
}

/// Two tiles of the left operand, of each piece, from 32 lines of a step each.
///
/// # Safety
/// As for [`paired`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn turned<T: Pieces<P>, const P: usize>(line: impl Fn(usize) -> *const T, to: *mut Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        paired(line, to);
        (0..2 * P).for_each(|tile| turn_tile(to.add(tile)));
    }
}

/// Pairs of a tile's lines as its columns.
///
/// # Safety
/// The tile lies there; the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn turn_tile(tile: *mut Tile) {
    let tile = tile.cast::<[__m512i; SIDE]>();
    // SAFETY: the caller's promise.
    unsafe { tile.write(turn_square(tile.read())) };
}
