//! A product on one thread: blocks that stay in the second cache, after Goto and van de Geijn, *Anatomy of high-performance matrix
//! multiplication* (2008).
//!
//! **Invariant**: a sum is cut into parts of [`DEPTH`] steps, counted from its beginning, whatever the sizes, strides and instruction
//! set; a part is added up in order with products rounded together with the sum. So a number of the output has the same bits however
//! the product is cut into tasks.

use std::cell::RefCell;

use super::{
    epilogue::Epilogue,
    factor::{Left, Matrix},
    kernel::{self, Block, Panels, Shape},
    pack::pack,
    register::Registers,
};
use crate::{Simd, machine::Machine};

/// Steps of a sum between two visits to the output. (With 256 the output of long sums is read and written twice as often; 512 was up to 5 %
/// faster from 1024 steps on.)
pub(super) const DEPTH: usize = 512;

/// A cache line, to which packed memory is aligned: a register's load that spans two costs twice.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line {
    _words: [u64; 8],
}

thread_local! {
    /// Packed columns and strips of rows; kept, so that a product allocates nothing.
    static PACKS: RefCell<[Vec<Line>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// `out = scale · a · b`, with what the epilogue adds, for `a: [m, k]`, `b: [k, n]`.
///
/// # Safety
/// The matrices lie in their operands; the output overlaps none of them, and nothing else sees it meanwhile.
pub(crate) unsafe fn product<T: Registers>(
    simd: Simd,
    [m, k, n]: [usize; 3],
    out: Matrix<*mut T>,
    a: Matrix<*const T>,
    b: Matrix<*const T>,
    scale: T,
    epilogue: Epilogue<T>,
) {
    // A row of the output is written register by register; and few columns would leave most of a panel empty.
    if out.column != 1 && out.row == 1 || n < Shape::of::<T>(simd).lanes && n < m {
        // SAFETY: the caller's promise.
        return unsafe {
            let left = Left::Strided(b.turned());
            product_of(simd, [n, k, m], out.turned(), left, a.turned(), scale, epilogue.turned())
        };
    }
    // SAFETY: as above.
    unsafe { product_of(simd, [m, k, n], out, Left::Strided(a), b, scale, epilogue) }
}

/// As [`product`], for any left operand, and in these roles.
///
/// # Safety
/// As for [`product`].
pub(crate) unsafe fn product_of<T: Registers>(
    simd: Simd,
    [m, k, n]: [usize; 3],
    out: Matrix<*mut T>,
    a: Left<'_, T>,
    b: Matrix<*const T>,
    scale: T,
    epilogue: Epilogue<T>,
) {
    let shape = Shape::of::<T>(simd);
    let panel = shape.registers * shape.lanes;
    // Packed columns fill the second-level cache but for a quarter, which rows and output pass through.
    let packed = Machine::get().l2 / 4 * 3;
    let most = packed / size_of::<T>() / DEPTH / panel * panel;
    // Blocks of equal size: rows that are read for a few columns alone are not worth their way.
    let columns = n.div_ceil(n.div_ceil(most).max(1)).next_multiple_of(panel).min(n.next_multiple_of(shape.lanes));
    PACKS.with_borrow_mut(|[packed, strips]| {
        let packed = room::<T>(packed, columns * k.min(DEPTH));
        let strips = room::<T>(strips, shape.strips(k.min(DEPTH)));
        for j in (0..n).step_by(columns) {
            // A sum of nothing is still written.
            for from in (0..k.max(1)).step_by(DEPTH) {
                let (depth, columns) = (DEPTH.min(k - from), columns.min(n - j));
                let block = Block {
                    rows: m,
                    depth,
                    columns,
                    a: a.part(0, from),
                    b: Panels { at: packed.as_ptr(), depth, from: 0 },
                    out: out.part(0, j),
                    scale,
                    epilogue: epilogue.part(0, j).of_part(from == 0, from + depth == k),
                };
                // SAFETY: the caller's promise; the memory is packed by the line before.
                unsafe {
                    pack(simd, shape, b.part(from, j), (depth, columns), packed);
                    kernel::run(simd, &block, strips);
                }
            }
        }
    });
}

/// At least so many numbers.
pub(crate) fn room<T: Registers>(lines: &mut Vec<Line>, numbers: usize) -> &mut [T] {
    let count = (numbers * size_of::<T>()).div_ceil(size_of::<Line>());
    if lines.len() < count {
        lines.resize(count, Line { _words: [0; 8] });
    }
    // SAFETY: so many bytes are there, initialised, and aligned for any number; every bit pattern is one.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), numbers) }
}
