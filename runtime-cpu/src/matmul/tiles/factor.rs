//! What a product in tiles takes: operands that can be packed, or read where they lie.

use super::{STEP, Tile, Work, multiply::Strip, pack::Packing, pieces::Pieces};
use crate::matmul::Matrix;

/// Rows so many bytes apart lie in the same lines of the first cache, which then does not keep a strip of them.
const ALIASED: usize = 4096;

/// A left operand.
pub(super) trait Left<T: Pieces<P>, const P: usize>: Copy {
    /// The part that begins there: at a multiple of 32 rows and steps.
    fn part(self, i: usize, k: usize) -> Self;

    /// The strip that begins here, where the tiles of a sum of `k` steps lie in memory; all rows of it are there.
    fn in_place(&self, k: usize) -> Option<Strip>;

    /// What packs a strip, `[depth / 32, P, 2]` tiles: `rows` of at most 32.
    ///
    /// # Safety
    /// Until all is packed: the numbers lie in their operand, `to` has room that nothing else sees, and the processor has the instructions.
    unsafe fn pack(self, rows: usize, depth: usize, to: *mut Tile) -> impl Work;

    /// # Safety
    /// It lies in its operand.
    unsafe fn number(self, i: usize, k: usize) -> f32;
}

/// A right operand.
pub(super) trait Right<T: Pieces<P>, const P: usize>: Copy {
    /// The part that begins there: at a multiple of 32 steps and columns.
    fn part(self, k: usize, j: usize) -> Self;

    /// What packs panels, `[columns / 32, depth / 32, P, 2]` tiles.
    ///
    /// # Safety
    /// As for [`Left::pack`].
    unsafe fn pack(self, depth: usize, columns: usize, to: *mut Tile) -> impl Work;

    /// # Safety
    /// It lies in its operand.
    unsafe fn number(self, k: usize, j: usize) -> f32;
}

impl<T: Pieces<P>, const P: usize> Left<T, P> for Matrix<*const T> {
    fn part(self, i: usize, k: usize) -> Self {
        self.part(i, k)
    }

    fn in_place(&self, k: usize) -> Option<Strip> {
        let line = self.row.unsigned_abs() * size_of::<u16>();
        let lies = P == 1 && self.column == 1 && k.is_multiple_of(STEP) && !line.is_multiple_of(ALIASED);
        lies.then(|| Strip::in_place(*self))
    }

    // SAFETY: the trait says what callers promise.
    unsafe fn pack(self, rows: usize, depth: usize, to: *mut Tile) -> impl Work {
        // SAFETY: the caller's promise.
        unsafe { Packing::left(self, rows, depth, to) }
    }

    // SAFETY: the trait says what callers promise.
    unsafe fn number(self, i: usize, k: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *self.part(i, k).at }.load()
    }
}

impl<T: Pieces<P>, const P: usize> Right<T, P> for Matrix<*const T> {
    fn part(self, k: usize, j: usize) -> Self {
        self.part(k, j)
    }

    // SAFETY: the trait says what callers promise.
    unsafe fn pack(self, depth: usize, columns: usize, to: *mut Tile) -> impl Work {
        // SAFETY: the caller's promise.
        unsafe { Packing::right(self, depth, columns, to) }
    }

    // SAFETY: the trait says what callers promise.
    unsafe fn number(self, k: usize, j: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *self.part(k, j).at }.load()
    }
}
