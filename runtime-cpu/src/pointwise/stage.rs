//! Moves between a tile of an operand, with any strides, and a block that holds it row by row.

use super::{kernel::Bits, plan::Tile};
use crate::{Simd, simd::leveled};

/// Fills a block of `n` elements with a value.
///
/// # Safety
/// `to` holds `n` elements of its size, and 8 bytes at least, aligned; nothing else sees them.
pub(super) unsafe fn splat(simd: Simd, to: *mut u8, value: &Bits, n: usize) {
    // SAFETY: the caller's promise.
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
/// `to` holds a tile of `i64`, aligned; nothing else sees it.
pub(super) unsafe fn positions(to: *mut u8, start: i64, size: Tile, (row, column): (isize, isize)) {
    // SAFETY: the caller's promise.
    let block = unsafe { slice::<i64>(to, size.rows * size.columns) };
    for (r, line) in block.chunks_exact_mut(size.columns).enumerate() {
        let first = start + (r as isize * row) as i64;
        line.iter_mut().enumerate().for_each(|(c, p)| *p = first + (c as isize * column) as i64);
    }
}

/// Brings a tile into a block; `size` is of an element, strides are in bytes.
///
/// # Safety
/// The tile lies in the operand and is not written meanwhile; the block holds it, and nothing else sees that.
pub(super) unsafe fn gather(simd: Simd, size: usize, to: *mut u8, from: *const u8, tile: Tile, strides: (isize, isize)) {
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 => gather_as::<u8>(simd, to, from, tile, strides),
            2 => gather_as::<u16>(simd, to, from, tile, strides),
            4 => gather_as::<u32>(simd, to, from, tile, strides),
            _ => gather_as::<u64>(simd, to, from, tile, strides),
        }
    }
}

/// Sends a block to a tile.
///
/// # Safety
/// The tile lies in an output, and nothing else sees it; the block holds as many elements.
pub(super) unsafe fn scatter(size: usize, to: *mut u8, from: *const u8, tile: Tile, strides: (isize, isize)) {
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 => scatter_as::<u8>(to, from, tile, strides),
            2 => scatter_as::<u16>(to, from, tile, strides),
            4 => scatter_as::<u32>(to, from, tile, strides),
            _ => scatter_as::<u64>(to, from, tile, strides),
        }
    }
}

/// # Safety
/// `n` elements, aligned, which nothing else sees.
unsafe fn slice<'a, T>(p: *mut u8, n: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(p.cast(), n) }
}

/// # Safety
/// As for [`gather`].
unsafe fn gather_as<T: Copy>(simd: Simd, to: *mut u8, from: *const u8, tile: Tile, (row, column): (isize, isize)) {
    // SAFETY: the caller's promise.
    let block = unsafe { slice::<T>(to, tile.rows * tile.columns) };
    // SAFETY: the caller's promise: every offset used is of an element of the tile.
    let at = |r: usize, c: usize| unsafe { from.offset(r as isize * row + c as isize * column).cast::<T>() };
    let lines = block.chunks_exact_mut(tile.columns).enumerate();
    if column == size_of::<T>() as isize {
        // SAFETY: as above.
        lines.for_each(|(r, line)| unsafe { at(r, 0).copy_to_nonoverlapping(line.as_mut_ptr(), line.len()) });
    } else if column == 0 {
        // SAFETY: as above.
        lines.for_each(|(r, line)| fill(simd, line, unsafe { *at(r, 0) }));
    } else if column.abs() <= row.abs() || tile.rows == 1 {
        // SAFETY: as above.
        lines.for_each(|(r, line)| line.iter_mut().enumerate().for_each(|(c, x)| *x = unsafe { *at(r, c) }));
    } else {
        for c in 0..tile.columns {
            for r in 0..tile.rows {
                // SAFETY: as above.
                block[r * tile.columns + c] = unsafe { *at(r, c) };
            }
        }
    }
}

/// # Safety
/// As for [`scatter`].
unsafe fn scatter_as<T: Copy>(to: *mut u8, from: *const u8, tile: Tile, (row, column): (isize, isize)) {
    // SAFETY: the caller's promise.
    let block = unsafe { std::slice::from_raw_parts(from.cast::<T>(), tile.rows * tile.columns) };
    let at = |r: usize, c: usize| to.wrapping_offset(r as isize * row + c as isize * column).cast::<T>();
    let lines = block.chunks_exact(tile.columns).enumerate();
    if column == size_of::<T>() as isize {
        // SAFETY: the caller's promise: the addresses are of elements of the tile.
        lines.for_each(|(r, line)| unsafe { at(r, 0).copy_from_nonoverlapping(line.as_ptr(), line.len()) });
    } else if column.abs() <= row.abs() || tile.rows == 1 {
        // SAFETY: as above.
        lines.for_each(|(r, line)| line.iter().enumerate().for_each(|(c, x)| unsafe { *at(r, c) = *x }));
    } else {
        for c in 0..tile.columns {
            // SAFETY: as above.
            (0..tile.rows).for_each(|r| unsafe { *at(r, c) = block[r * tile.columns + c] });
        }
    }
}

leveled! {
    fn fill<T: (Copy)>(to: &mut [T], value: T) {
        to.fill(value);
    }
}
