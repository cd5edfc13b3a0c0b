//! GEMM whose packed operands and accumulators the caller keeps in tiles, for kernels that compute with accumulators
//! while they are in cache: attention.
//!
//! An A micro-panel is `[k / 32, TERMS, 2]` tiles, and B is `[n / 32, k / 32, TERMS, 2]`. The accumulators of an A
//! micro-panel are `[n / 32, 2, 2]` tiles of 16 × 16 elements, those of its first 16 rows first.

use super::{
    BackgroundTask, Tile,
    micro_kernel::{self, PanelTiles, Streamed, multiply},
    pack_tiles::{self, TilePacker},
    split::SplitBf16,
    tile_config::TileConfig,
    vnni::k_pair,
};
use crate::{Simd, gemm::Matrix};

/// The tile registers of this thread, until dropped, for elements of `TERMS` bf16 terms. No other GEMM may run on this
/// thread meanwhile.
pub(crate) struct TileUnit<const TERMS: usize> {
    _config: TileConfig,
}

impl<const TERMS: usize> TileUnit<TERMS> {
    /// Rows of an A micro-panel, columns of a B micro-panel, and the depth of a tile: two tiles, two tiles, and one.
    pub(crate) const PANEL: usize = pack_tiles::PANEL;
    /// Tiles of a micro-panel along one tile's depth, those of the largest terms first.
    pub(crate) const PANEL_TILES: usize = 2 * TERMS;

    /// The two indices along `k` that are stored as pair `pair` of a tile's 16 pairs.
    pub(crate) const fn k_pair(pair: usize) -> [usize; 2] {
        k_pair(pair, TERMS)
    }

    /// Configures the tile registers, if `simd` has them.
    pub(crate) fn new(simd: Simd) -> Option<Self> {
        // SAFETY: a runtime is only built with a `Simd` that this CPU supports.
        (simd == Simd::Amx).then(|| unsafe { TileUnit { _config: TileConfig::new() } })
    }

    /// Packs an A micro-panel of at most 32 rows. What fills up a tile is zero.
    ///
    /// # Safety
    /// `a` is valid for `[rows, k]` elements, and `to` for the tiles of a micro-panel.
    pub(crate) unsafe fn pack_a<T: SplitBf16<TERMS>>(
        &self,
        a: Matrix<*const T>,
        (rows, k): (usize, usize),
        to: *mut Tile,
    ) {
        // SAFETY: the caller guarantees `a` and `to`; `self` exists, so the CPU supports the instructions.
        unsafe { TilePacker::a(a, rows, k, to).finish() };
    }

    /// Packs columns of B. What fills up a tile is zero.
    ///
    /// # Safety
    /// `b` is valid for `[k, columns]` elements, and `to` for the tiles of their micro-panels.
    pub(crate) unsafe fn pack_b<T: SplitBf16<TERMS>>(
        &self,
        b: Matrix<*const T>,
        (k, columns): (usize, usize),
        to: *mut Tile,
    ) {
        // SAFETY: the caller guarantees `b` and `to`; `self` exists, so the CPU supports the instructions.
        unsafe { TilePacker::b(b, k, columns, to).finish() };
    }

    /// Slots for background work along one tile's depth.
    pub(crate) const SLOTS: usize = micro_kernel::slots_per_k_tile(TERMS);

    /// Multiplies an A micro-panel by a B micro-panel, over `k_tiles` tiles along `k`. The result is added to the
    /// accumulators if `accumulate`, otherwise it replaces them. `background` is called [`SLOTS`](TileUnit::SLOTS)
    /// times for each tile along `k`: the CPU runs both at once.
    ///
    /// # Safety
    /// `a` and `b` are valid for [`PANEL_TILES`](TileUnit::PANEL_TILES) tiles for each of `k_tiles`, and `acc` for four
    /// tiles, which no other thread accesses. `background` uses no tile registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    pub(crate) unsafe fn multiply(
        &self,
        (a, b): (*const Tile, *const Tile),
        acc: *mut Tile,
        k_tiles: usize,
        accumulate: bool,
        background: impl FnMut(),
    ) {
        let (a, b) = (PanelTiles::packed(a, TERMS), Streamed(PanelTiles::packed(b, TERMS)));
        // SAFETY: the caller guarantees the tiles; `self` has configured the registers.
        unsafe { multiply::<_, _, TERMS>((a, b), acc, k_tiles, accumulate, background) };
    }
}
