//! Products with a right operand that is packed once and used by many: attention's blocks.

use std::ops::Range;

use super::{
    epilogue::Epilogue,
    factor::{Left, Matrix},
    kernel::{self, Block, Panels, Shape},
    pack::pack,
    register::Registers,
};
use crate::Simd;

/// A packed right operand.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a, T> {
    simd: Simd,
    numbers: &'a [T],
    depth: usize,
    columns: usize,
}

impl<'a, T: Registers> Packed<'a, T> {
    /// Numbers that `depth × columns` take, at every level.
    pub(crate) const fn room(depth: usize, columns: usize) -> usize {
        depth * columns.next_multiple_of(16)
    }

    /// Packs `depth × columns` of `b` into `to`, which has [room](Packed::room) for them.
    ///
    /// # Safety
    /// The numbers of `b` lie in its operand.
    pub(crate) unsafe fn new(
        simd: Simd,
        b: Matrix<*const T>,
        (depth, columns): (usize, usize),
        to: &'a mut [T],
    ) -> Packed<'a, T> {
        // SAFETY: the caller's promise.
        unsafe { pack(simd, Shape::of::<T>(simd), b, (depth, columns), to) };
        Packed { simd, numbers: to, depth, columns }
    }

    /// `out = scale · a · b (+ out)` for the rows of `a`, the first `columns` of `b` and these `steps` of the sum, the first of which is `a`'s
    /// first. More columns may be written, where `b` has them.
    ///
    /// # Safety
    /// The matrices lie in their operands; `out` has all columns of `b`, overlaps neither operand, and nothing else sees it meanwhile.
    pub(crate) unsafe fn times(
        self,
        (rows, steps, columns): (usize, Range<usize>, usize),
        a: Left<'_, T>,
        out: Matrix<*mut T>,
        scale: T,
        add: bool,
    ) {
        debug_assert!(steps.end <= self.depth && columns <= self.columns);
        let block = Block {
            rows,
            depth: steps.len(),
            columns: self.whole_panels(columns),
            a,
            b: Panels { at: self.numbers.as_ptr(), depth: self.depth, from: steps.start },
            out,
            scale,
            epilogue: Epilogue::adding(add),
        };
        // SAFETY: the caller's promise; nothing is laid out.
        unsafe { kernel::run(self.simd, &block, &mut []) };
    }

    /// `columns`, and those up to the end of their panel: where panels begin depends on how many columns were packed.
    fn whole_panels(&self, columns: usize) -> usize {
        let shape = Shape::of::<T>(self.simd);
        let mut end = 0;
        while end < columns {
            end += shape.panel(self.columns - end);
        }
        end.min(self.columns)
    }
}
