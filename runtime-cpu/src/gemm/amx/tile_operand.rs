//! The operands of a GEMM in tiles: A may be read in place or packed, B is packed.

use super::{BackgroundTask, TILE_K, Tile, micro_kernel::PanelTiles, pack_tiles::TilePacker, split::SplitBf16};
use crate::gemm::Matrix;

/// Rows that are a multiple of this many bytes apart map to the same sets of L1, which then cannot hold a micro-panel
/// of them.
const ALIASED: usize = 4096;

/// An A operand of the tiled GEMM.
pub(super) trait TileA<T: SplitBf16<TERMS>, const TERMS: usize>: Copy {
    /// The part from row `i` and column `k` on, both multiples of 32.
    fn offset(self, i: usize, k: usize) -> Self;

    /// The micro-panel that begins here, if the tiles of a sum of `k` products are in memory as they are. It must have
    /// all its 32 rows.
    fn in_place(&self, k: usize) -> Option<PanelTiles>;

    /// The task that packs a micro-panel of at most 32 `rows` into `[kc / 32, TERMS, 2]` tiles.
    ///
    /// # Safety
    /// Until all is packed: the operand is valid for `[rows, kc]` elements, `to` for the tiles, which no other thread
    /// accesses, and the CPU supports AVX-512 BF16.
    unsafe fn pack(self, rows: usize, kc: usize, to: *mut Tile) -> impl BackgroundTask;

    /// The element in row `i` and column `k`.
    ///
    /// # Safety
    /// The operand is valid at row `i` and column `k`.
    unsafe fn element(self, i: usize, k: usize) -> f32;
}

/// A B operand of the tiled GEMM.
pub(super) trait TileB<T: SplitBf16<TERMS>, const TERMS: usize>: Copy {
    /// The part from row `k` and column `j` on, both multiples of 32.
    fn offset(self, k: usize, j: usize) -> Self;

    /// The task that packs micro-panels into `[columns / 32, kc / 32, TERMS, 2]` tiles.
    ///
    /// # Safety
    /// Until all is packed: the operand is valid for `[kc, columns]` elements, `to` for the tiles, which no other
    /// thread accesses, and the CPU supports AVX-512 BF16.
    unsafe fn pack(self, kc: usize, columns: usize, to: *mut Tile) -> impl BackgroundTask;

    /// The element in row `k` and column `j`.
    ///
    /// # Safety
    /// The operand is valid at row `k` and column `j`.
    unsafe fn element(self, k: usize, j: usize) -> f32;
}

impl<T: SplitBf16<TERMS>, const TERMS: usize> TileA<T, TERMS> for Matrix<*const T> {
    fn offset(self, i: usize, k: usize) -> Self {
        self.offset(i, k)
    }

    fn in_place(&self, k: usize) -> Option<PanelTiles> {
        let row_bytes = self.row.unsigned_abs() * size_of::<u16>();
        let fits = TERMS == 1 && self.column == 1 && k.is_multiple_of(TILE_K) && !row_bytes.is_multiple_of(ALIASED);
        fits.then(|| PanelTiles::in_place(*self))
    }

    // SAFETY: `TileA` states what callers guarantee.
    unsafe fn pack(self, rows: usize, kc: usize, to: *mut Tile) -> impl BackgroundTask {
        // SAFETY: the caller guarantees operand, tiles and CPU, until all is packed.
        unsafe { TilePacker::a(self, rows, kc, to) }
    }

    // SAFETY: `TileA` states what callers guarantee.
    unsafe fn element(self, i: usize, k: usize) -> f32 {
        // SAFETY: the caller guarantees row `i` and column `k`.
        unsafe { *self.offset(i, k).at }.load()
    }
}

impl<T: SplitBf16<TERMS>, const TERMS: usize> TileB<T, TERMS> for Matrix<*const T> {
    fn offset(self, k: usize, j: usize) -> Self {
        self.offset(k, j)
    }

    // SAFETY: `TileB` states what callers guarantee.
    unsafe fn pack(self, kc: usize, columns: usize, to: *mut Tile) -> impl BackgroundTask {
        // SAFETY: the caller guarantees operand, tiles and CPU, until all is packed.
        unsafe { TilePacker::b(self, kc, columns, to) }
    }

    // SAFETY: `TileB` states what callers guarantee.
    unsafe fn element(self, k: usize, j: usize) -> f32 {
        // SAFETY: the caller guarantees row `k` and column `j`.
        unsafe { *self.offset(k, j).at }.load()
    }
}
