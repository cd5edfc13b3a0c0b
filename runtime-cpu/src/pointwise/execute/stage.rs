//! Copies tiles: gathers one from an operand of any strides into a contiguous block, scatters it back, or copies it
//! straight from one operand to another.

use super::plan::Tile;
use crate::{
    Simd,
    pointwise::compile::ImmediateBits,
    simd::{multiversion, transpose},
};

/// A side of a copy: the address of a tile's first element, and the bytes to the next row and the next column.
#[derive(Clone, Copy)]
pub(in crate::pointwise) struct Side {
    pub at: *mut u8,
    pub row: isize,
    pub column: isize,
}

impl Side {
    /// A tile of `columns` elements of a size per row, without gaps.
    pub(in crate::pointwise) fn dense(at: *mut u8, size: usize, columns: usize) -> Side {
        Side { at, row: (columns * size) as isize, column: size as isize }
    }

    /// The transposed side.
    fn transposed(self) -> Side {
        Side { at: self.at, row: self.column, column: self.row }
    }

    /// The address of an element.
    #[inline(always)]
    fn element<T>(self, row: usize, column: usize) -> *mut T {
        self.at.wrapping_offset(row as isize * self.row + column as isize * self.column).cast()
    }
}

/// Fills a block of `n` elements with a value.
///
/// # Safety
/// `to` holds `n` elements of its size, and 8 bytes at least, aligned; no other thread accesses them.
pub(in crate::pointwise) unsafe fn splat(simd: Simd, to: *mut u8, value: &ImmediateBits, n: usize) {
    // SAFETY: the caller guarantees `n` elements of the value's size.
    unsafe {
        match value.size {
            1 => fill(simd, slice::<u8>(to, n), value.bytes[0]),
            4 => fill(simd, slice::<u32>(to, n), u32::from_ne_bytes([0, 1, 2, 3].map(|i| value.bytes[i]))),
            _ => fill(simd, slice::<u64>(to, n), u64::from_ne_bytes(value.bytes)),
        }
    }
}

/// The positions of a tile whose first one is `start`, with strides in positions.
///
/// # Safety
/// `to` holds a tile of `i64`, aligned; no other thread accesses it.
pub(in crate::pointwise) unsafe fn positions(
    simd: Simd,
    to: *mut u8,
    start: i64,
    size: Tile,
    (row, column): (isize, isize),
) {
    // SAFETY: the caller guarantees a tile of `i64`.
    let block = unsafe { slice::<i64>(to, size.rows * size.columns) };
    for (r, line) in block.chunks_exact_mut(size.columns).enumerate() {
        count(simd, line, start + (r as isize * row) as i64, column as i64);
    }
}

/// Copies a tile of elements of `size` bytes.
///
/// # Safety
/// Both sides hold the tile and are aligned. Nothing writes `from` meanwhile, and no other thread accesses `to`.
pub(in crate::pointwise) unsafe fn copy(simd: Simd, size: usize, to: Side, from: Side, tile: Tile) {
    // SAFETY: the caller guarantees that both sides hold the tile.
    unsafe {
        match size {
            1 => copy_as::<u8>(simd, to, from, tile),
            2 => copy_as::<u16>(simd, to, from, tile),
            4 => copy_as::<u32>(simd, to, from, tile),
            _ => copy_as::<u64>(simd, to, from, tile),
        }
    }
}

/// # Safety
/// As for [`copy`]: both sides hold the tile, with elements of type `T`.
unsafe fn copy_as<T: Copy>(simd: Simd, to: Side, from: Side, tile: Tile) {
    let size = size_of::<T>() as isize;
    // SAFETY: in all arms addresses are those of elements of the tile, which the caller guarantees on both sides.
    unsafe {
        match (to.row, to.column, from.row, from.column) {
            (_, t, _, f) if t == size && f == size => (0..tile.rows)
                .for_each(|r| from.element::<T>(r, 0).copy_to_nonoverlapping(to.element::<T>(r, 0), tile.columns)),
            (_, t, _, 0) if t == size => (0..tile.rows)
                .for_each(|r| fill(simd, slice::<T>(to.element::<u8>(r, 0), tile.columns), *from.element::<T>(r, 0))),
            (_, t, f, _) if t == size && f == size => {
                transpose::<T>(simd, (to.at, to.row), (from.at, from.column), (tile.rows, tile.columns));
            }
            (t, _, _, f) if t == size && f == size => {
                transpose::<T>(simd, (to.at, to.column), (from.at, from.row), (tile.columns, tile.rows));
            }
            _ if to.column.abs() <= to.row.abs() || tile.rows == 1 => each::<T>(to, from, tile.rows, tile.columns),
            _ => each::<T>(to.transposed(), from.transposed(), tile.columns, tile.rows),
        }
    }
}

/// # Safety
/// As for [`copy`]: both sides hold `[rows, columns]` elements.
#[inline(always)]
unsafe fn each<T: Copy>(to: Side, from: Side, rows: usize, columns: usize) {
    for r in 0..rows {
        for c in 0..columns {
            // SAFETY: row `r` and column `c` are within the tile, which the caller guarantees.
            unsafe { *to.element::<T>(r, c) = *from.element::<T>(r, c) };
        }
    }
}

/// # Safety
/// `p` is valid for `n` elements, aligned, which no other thread accesses.
unsafe fn slice<'a, T>(p: *mut u8, n: usize) -> &'a mut [T] {
    // SAFETY: the caller guarantees `n` elements.
    unsafe { std::slice::from_raw_parts_mut(p.cast(), n) }
}

multiversion! {
    fn fill<T: (Copy)>(to: &mut [T], value: T) {
        to.fill(value);
    }

    fn count(to: &mut [i64], first: i64, step: i64) {
        for (i, to) in to.iter_mut().enumerate() {
            *to = first + i as i64 * step;
        }
    }
}
