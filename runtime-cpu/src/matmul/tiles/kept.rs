//! Products of which operands and sums stay in tiles, for kernels that compute with the sums while they are in cache: attention's.
//!
//! A strip of the left operand is `[depth / 32, P, 2]` tiles of numbers of `P` pieces, the right one `[columns / 32, depth / 32, P, 2]`, and
//! sums of a strip are `[columns / 32, 2, 2]` tiles of 16 × 16 numbers, those of its first 16 rows first.

use super::{
    Tile, Work, amx,
    multiply::{self, Passing, Strip, multiply},
    pack::{self, Packing},
    pairs::steps_of,
    pieces::Pieces,
};
use crate::{Simd, matmul::Matrix};

/// The tile registers of this thread, until dropped, for products of numbers of `P` pieces; no other product may be computed meanwhile.
pub(crate) struct Tiles<const P: usize> {
    _registers: amx::Registers,
}

impl<const P: usize> Tiles<P> {
    /// Rows of a strip, and columns of a panel: two tiles each. As many steps has a tile.
    pub(crate) const SIDE: usize = pack::PAIR;
    /// Tiles of a step of a strip, or of a panel: first those of the largest pieces.
    pub(crate) const STEP: usize = 2 * P;

    /// The steps of a tile that lie side by side, of 16 pairs.
    pub(crate) const fn pair(pair: usize) -> [usize; 2] {
        steps_of(pair, P)
    }

    /// The registers, if this level has them.
    pub(crate) fn of(simd: Simd) -> Option<Self> {
        // SAFETY: they are there.
        (simd == Simd::Amx).then(|| unsafe { Tiles { _registers: amx::Registers::new() } })
    }

    /// A strip of the left operand, of at most 32 rows. What fills up a tile is zero.
    ///
    /// # Safety
    /// The numbers lie in their operand; `to` has room.
    pub(crate) unsafe fn left<T: Pieces<P>>(&self, a: Matrix<*const T>, (rows, depth): (usize, usize), to: *mut Tile) {
        // SAFETY: the caller's promise; the processor has the instructions.
        unsafe { Packing::left(a, rows, depth, to).finish() };
    }

    /// Columns of the right operand. What fills up a tile is zero.
    ///
    /// # Safety
    /// As for [`left`](Tiles::left).
    pub(crate) unsafe fn right<T: Pieces<P>>(
        &self,
        b: Matrix<*const T>,
        (depth, columns): (usize, usize),
        to: *mut Tile,
    ) {
        // SAFETY: the caller's promise; the processor has the instructions.
        unsafe { Packing::right(b, depth, columns, to).finish() };
    }

    /// Pieces of other work that go between the products of a step.
    pub(crate) const PARTS: usize = multiply::calls(P);

    /// The product of a strip with a panel, `steps` tiles long, to the sums (in place of them, if they are not `kept`), and other work, which
    /// must use no tiles, [`PARTS`](Tiles::PARTS) times a step: the processor multiplies meanwhile.
    ///
    /// # Safety
    /// [`Tiles::STEP`] tiles a step lie at `a` and at `b`, four sums at `sums`, which nothing else sees.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    pub(crate) unsafe fn multiply(
        &self,
        (a, b): (*const Tile, *const Tile),
        sums: *mut Tile,
        steps: usize,
        kept: bool,
        work: impl FnMut(),
    ) {
        // SAFETY: the caller's promise; this thread has the registers.
        unsafe { multiply::<_, _, P>((Strip::packed(a, P), Passing(Strip::packed(b, P))), sums, steps, kept, work) };
    }
}
