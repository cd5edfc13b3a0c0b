//! Products of which operands and sums stay in tiles, for kernels that compute with the sums while they are in cache: attention's.
//!
//! A strip of the left operand is `[depth / 32, 2]` tiles, the right one `[columns / 32, depth / 32, 2]`, and sums of a strip are
//! `[columns / 32, 2, 2]` tiles of 16 × 16 numbers, those of its first 16 rows first.

use half::bf16;

use super::{
    Tile, amx,
    pack::{self, Strip},
};
use crate::{Simd, matmul::Matrix};

/// The tile registers of this thread, until dropped; no other product of bf16 may be computed meanwhile.
pub(crate) struct Tiles {
    _registers: amx::Registers,
}

impl Tiles {
    /// Rows of a strip, and columns of a panel: two tiles each. As many steps has a tile.
    pub(crate) const SIDE: usize = pack::PAIR;

    /// Whether this processor multiplies tiles, and `simd` is the level beside which it does.
    pub(crate) fn are_there(simd: Simd) -> bool {
        simd == Simd::Amx
    }

    /// The registers, if there are any.
    pub(crate) fn of(simd: Simd) -> Option<Tiles> {
        // SAFETY: they are there.
        Self::are_there(simd).then(|| unsafe { Tiles { _registers: amx::Registers::new() } })
    }

    /// A strip of the left operand, of at most 32 rows. Steps that fill up a tile are zero, rows are anything.
    ///
    /// # Safety
    /// The numbers lie in their operand; `to` has room.
    pub(crate) unsafe fn left(&self, a: Matrix<*const bf16>, (rows, depth): (usize, usize), to: *mut Tile) {
        // SAFETY: the caller's promise; the processor has the instructions.
        unsafe { pack::left::<bf16, 1>(a, rows, depth, to) };
    }

    /// Columns of the right operand. What fills up a tile is zero, or other columns.
    ///
    /// # Safety
    /// As for [`left`](Tiles::left).
    pub(crate) unsafe fn right(&self, b: Matrix<*const bf16>, (depth, columns): (usize, usize), to: *mut Tile) {
        // SAFETY: the caller's promise; the processor has the instructions.
        unsafe { pack::right::<bf16, 1>(b, depth, columns, to) };
    }

    /// The product of a strip with a panel, `steps` tiles long, to the sums (in place of them, if they are not `kept`).
    ///
    /// # Safety
    /// Two tiles a step lie at `a` and at `b`, four sums at `sums`, which nothing else sees.
    pub(crate) unsafe fn multiply(&self, a: *const Tile, b: *const Tile, sums: *mut Tile, steps: usize, kept: bool) {
        debug_assert!(steps > 0);
        // SAFETY: the caller's promise; this thread has the registers.
        unsafe { amx::multiply::<1>(Strip::packed(a, 1), b, sums, steps, kept, [2, 2]) };
    }
}
