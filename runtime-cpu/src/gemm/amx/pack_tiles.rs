//! Packs operands into tiles: 16 rows of A by 32 along `k`; 16 columns of B by 16 pairs along `k`. What fills up a tile
//! is zero. Of split elements, the tiles of the largest terms come first.
//!
//! Rows of 32 contiguous elements become rows of tiles: along `k` of a row of A, or across the columns of a
//! [pair](super::vnni) of rows of B. Where an operand is stored the other way, its tiles are transposed afterwards.

use std::arch::x86_64::*;

use super::{
    BackgroundTask, TILE_DIM, TILE_K, Tile,
    split::SplitBf16,
    tile_rows::{load_row, pack_across_k, pack_along_k, store_pair, store_row, transpose_tile},
    vnni::k_pair,
};
use crate::gemm::Matrix;

/// Rows of an A micro-panel (MR) and columns of a B micro-panel (NR): two tiles.
pub(super) const PANEL: usize = 2 * TILE_DIM;

/// The task that packs an operand row by row: an A micro-panel, or B micro-panels, into `[panels, kc / 32, TERMS, 2]`
/// tiles.
pub(crate) struct TilePacker<T, const TERMS: usize> {
    /// The matrix to pack: its rows are A's rows, or B's columns; its columns run along `k`.
    of: Matrix<*const T>,
    rows: usize,
    kc: usize,
    tiles: *mut Tile,
    /// True if contiguous rows run along `k`.
    along_k: bool,
    /// True if tiles are transposed after they are filled.
    transpose: bool,
    /// The position of packing: a row of a micro-panel, or a tile of its depth.
    panel: usize,
    row: usize,
    k_tile: usize,
    run: Run<T>,
    /// Rows, and tiles to be transposed, that remain.
    remaining: usize,
}

/// Rows at equal distances, in memory and in tiles. The next row's address is an addition, since the CPU sees only so
/// many instructions ahead of the multiplications between which it packs.
#[derive(Clone, Copy)]
struct Run<T> {
    kind: Kind,
    from: *const T,
    from_step: isize,
    /// The distance from a row to the one that is prefetched.
    prefetch: isize,
    to: *mut __m512i,
    to_step: usize,
    remaining: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    /// The rows of the source run along `k`.
    AlongK,
    /// The rows are packed in pairs across `k`.
    AcrossK,
    /// The rows are incomplete, missing or not contiguous.
    Edge,
    /// The tiles are to be transposed.
    Transpose,
}

/// Elements between prefetching a row along `k` and packing it. (Half of the packing time was spent waiting for memory:
/// between multiplications the CPU does not see far enough ahead. Of 128, 256 and 768 elements this was the best by 2
/// %; in a later build packing along `k` was as fast without.)
const PREFETCH_DISTANCE: isize = 128;

impl<T: SplitBf16<TERMS>, const TERMS: usize> TilePacker<T, TERMS> {
    /// The distance from the first element of a pair along `k` to the second.
    const PAIR_DISTANCE: isize = k_pair(0, TERMS)[1] as isize;

    /// Packs an A micro-panel of at most 32 rows.
    ///
    /// # Safety
    /// Until all is packed: `a` is valid for `[rows, kc]` elements, `to` for the micro-panel's tiles, which no other
    /// thread accesses, and the CPU supports AVX-512 BF16.
    pub(super) unsafe fn a(a: Matrix<*const T>, rows: usize, kc: usize, to: *mut Tile) -> Self {
        let across_k = a.column != 1 && a.row == 1;
        TilePacker::new(a, [rows, kc], to, !across_k, across_k)
    }

    /// Packs columns of B.
    ///
    /// # Safety
    /// Until all is packed: `b` is valid for `[kc, columns]` elements, `to` for the micro-panels' tiles, which no other
    /// thread accesses, and the CPU supports AVX-512 BF16.
    pub(super) unsafe fn b(b: Matrix<*const T>, kc: usize, columns: usize, to: *mut Tile) -> Self {
        let along_k = b.row == 1;
        TilePacker::new(b.transposed(), [columns, kc], to, along_k, along_k)
    }

    fn new(of: Matrix<*const T>, [rows, kc]: [usize; 2], tiles: *mut Tile, along_k: bool, transpose: bool) -> Self {
        let run = Run {
            kind: Kind::Edge,
            from: of.at,
            from_step: 0,
            prefetch: 0,
            to: tiles.cast(),
            to_step: 0,
            remaining: 0,
        };
        let mut packer =
            TilePacker { of, rows, kc, tiles, along_k, transpose, panel: 0, row: 0, k_tile: 0, run, remaining: 0 };
        let [panels, k_tiles] = packer.sizes();
        packer.remaining = panels * k_tiles * (packer.rows_per_tile() + if transpose { 2 * TERMS } else { 0 });
        if packer.remaining > 0 {
            packer.begin();
        }
        packer
    }

    /// The number of micro-panels, and of tiles along their depth.
    fn sizes(&self) -> [usize; 2] {
        [self.rows.div_ceil(PANEL), self.kc.div_ceil(TILE_K)]
    }

    /// Rows of a micro-panel's tiles that one pass along the depth of a tile fills.
    fn rows_per_tile(&self) -> usize {
        if self.along_k { PANEL } else { TILE_DIM }
    }

    /// Tells whether a run follows one row of A along `k`, tile after tile, which needs no transposition. Otherwise it
    /// fills one tile.
    fn by_row(&self) -> bool {
        self.along_k && !self.transpose
    }

    fn tile(&self) -> *mut Tile {
        self.tiles.wrapping_add((self.panel * self.sizes()[1] + self.k_tile) * 2 * TERMS)
    }

    /// Begins the run at this panel, row and tile.
    fn begin(&mut self) {
        let (rows, depth) = (self.rows - self.panel * PANEL, self.kc - self.k_tile * TILE_K);
        let here = self.of.offset(self.panel * PANEL + self.row, self.k_tile * TILE_K);
        let whole = rows >= PANEL && depth >= TILE_K;
        self.run = if self.by_row() {
            let whole = self.of.column == 1 && self.row < rows;
            let (kind, remaining) = match depth / TILE_K {
                count @ 1.. if whole => (Kind::AlongK, count),
                _ => (Kind::Edge, depth.div_ceil(TILE_K)),
            };
            let to = self.tile().cast::<__m512i>().wrapping_add(self.row);
            Run {
                kind,
                from: here.at,
                from_step: TILE_K as isize * self.of.column,
                prefetch: PREFETCH_DISTANCE,
                to,
                to_step: 2 * TERMS * TILE_DIM,
                remaining,
            }
        } else if self.along_k {
            let kind = if whole && self.of.column == 1 { Kind::AlongK } else { Kind::Edge };
            Run {
                kind,
                from: here.at,
                from_step: self.of.row,
                prefetch: TILE_K as isize,
                to: self.tile().cast(),
                to_step: 1,
                remaining: PANEL,
            }
        } else {
            let kind = if whole && self.of.row == 1 { Kind::AcrossK } else { Kind::Edge };
            Run {
                kind,
                from: here.at,
                from_step: k_pair(1, TERMS)[0] as isize * self.of.column,
                prefetch: if self.sizes()[0] > 1 { PANEL as isize } else { TILE_K as isize * self.of.column },
                to: self.tile().cast(),
                to_step: 1,
                remaining: TILE_DIM,
            }
        };
    }

    /// Advances to the run after this one.
    #[inline(never)]
    fn next(&mut self) {
        let [panels, k_tiles] = self.sizes();
        if self.by_row() {
            // The rest of a row, less than a tile's depth, is a separate run, at the edge.
            let done = matches!(self.run.kind, Kind::Edge) || self.kc.is_multiple_of(TILE_K);
            self.k_tile = if done { 0 } else { k_tiles - 1 };
            self.row += usize::from(done);
            if self.row == PANEL {
                (self.row, self.panel) = (0, self.panel + 1);
            }
        } else if self.transpose && !matches!(self.run.kind, Kind::Transpose) {
            let (to, remaining) = (self.tile().cast(), 2 * TERMS);
            self.run = Run { kind: Kind::Transpose, to, to_step: TILE_DIM, remaining, ..self.run };
            return;
        } else {
            let [inner, outer] =
                if self.along_k { [&mut self.k_tile, &mut self.panel] } else { [&mut self.panel, &mut self.k_tile] };
            *inner += 1;
            if *inner == if self.along_k { k_tiles } else { panels } {
                (*inner, *outer) = (0, *outer + 1);
            }
        }
        if self.remaining > 0 {
            self.begin();
        }
    }

    /// Packs the next row of a run of whole rows.
    ///
    /// # Safety
    /// As for [`BackgroundTask::advance`]: a row remains, and the CPU supports AVX-512 BF16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn whole_row(&mut self) {
        let run = &mut self.run;
        // SAFETY: `TilePacker::a` or `b` made this, whose caller guarantees operand and tiles until all is packed.
        unsafe {
            match run.kind {
                Kind::AcrossK => pack_across_k(run.from, Self::PAIR_DISTANCE * self.of.column, run.prefetch, run.to),
                _ => pack_along_k(run.from, run.prefetch, run.to),
            }
        }
        run.from = run.from.wrapping_offset(run.from_step);
        run.to = run.to.wrapping_add(run.to_step);
        run.remaining -= 1;
        self.remaining -= 1;
    }

    /// Packs `count` rows of the run, or transposes `count` tiles.
    ///
    /// # Safety
    /// As for [`BackgroundTask::advance`], and `count` rows of the run remain.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn advance_by(&mut self, count: usize) {
        // The fields become variables, which stay in registers; a copy of the run would be in memory.
        let Run { kind, mut from, from_step, prefetch, mut to, to_step, mut remaining } = self.run;
        for _ in 0..count {
            // SAFETY: `TilePacker::a` or `b` made this, whose caller guarantees operand and tiles until all is packed.
            unsafe {
                match kind {
                    Kind::AlongK => pack_along_k(from, prefetch, to),
                    Kind::AcrossK => pack_across_k(from, Self::PAIR_DISTANCE * self.of.column, prefetch, to),
                    Kind::Transpose => transpose_tile(to.cast()),
                    Kind::Edge => self.edge_row(from, to, remaining),
                }
            }
            from = from.wrapping_offset(from_step);
            to = to.wrapping_add(to_step);
            remaining -= 1;
        }
        (self.run.from, self.run.to, self.run.remaining) = (from, to, remaining);
        self.remaining -= count;
    }

    /// Packs a row that is incomplete or not contiguous; missing elements are zero. `remaining` rows of its run remain,
    /// with this one.
    ///
    /// # Safety
    /// As for [`BackgroundTask::advance`]: a row remains, and the CPU supports AVX-512 BF16.
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn edge_row(&self, from: *const T, to: *mut __m512i, remaining: usize) {
        let rows = self.rows - self.panel * PANEL;
        // SAFETY: `TilePacker::a` or `b` made this, whose caller guarantees operand and tiles; `load_row` reads only
        // elements within `[rows, kc]`.
        unsafe {
            if self.along_k {
                let (at, k_tile) = match self.by_row() {
                    true => (self.row, self.sizes()[1] - remaining),
                    false => (PANEL - remaining, self.k_tile),
                };
                let count = if at < rows { self.kc - k_tile * TILE_K } else { 0 };
                store_row(T::pack_row(load_row(from, self.of.column, count)), to);
            } else {
                let pair = k_pair(TILE_DIM - remaining, TERMS);
                let lines = pair.map(|k| {
                    let at = from.wrapping_offset((k - pair[0]) as isize * self.of.column);
                    load_row(at, self.of.row, if self.k_tile * TILE_K + k < self.kc { rows } else { 0 })
                });
                store_pair(T::pack_pair(lines), to);
            }
        }
    }
}

impl<T: SplitBf16<TERMS>, const TERMS: usize> BackgroundTask for TilePacker<T, TERMS> {
    fn remaining(&self) -> usize {
        self.remaining
    }

    /// # Safety
    /// As for [`BackgroundTask::advance`]: a row remains, and the CPU supports AVX-512 BF16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn advance(&mut self) {
        // SAFETY: a row remains and the CPU supports AVX-512 BF16, which the caller guarantees.
        unsafe {
            match self.run.kind {
                Kind::AlongK | Kind::AcrossK => self.whole_row(),
                Kind::Edge | Kind::Transpose => self.advance_by(1),
            }
        }
        if self.run.remaining == 0 {
            self.next();
        }
    }

    /// # Safety
    /// As for [`BackgroundTask::finish`]: the CPU supports AVX-512 BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn finish(&mut self) {
        while self.remaining > 0 {
            // SAFETY: the rows of the run remain; the caller guarantees AVX-512 BF16.
            unsafe { self.advance_by(self.run.remaining) };
            self.next();
        }
    }
}
