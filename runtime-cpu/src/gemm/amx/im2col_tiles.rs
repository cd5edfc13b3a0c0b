//! GEMM in tiles with an im2col view as the A operand: its rows are copied from a [split image](SplitImage). (Split at
//! every tap of the kernel, packing took longer than the multiplications.)

use std::{arch::x86_64::*, cell::RefCell};

use smallvec::SmallVec;

use super::{
    BackgroundTask, Bf16Isa, GemmSize, TILE_K, Tile,
    micro_kernel::PanelTiles,
    pack_tiles::PANEL,
    split_image::{SplitImage, TERMS, split_image},
    tile_loops,
    tile_operand::TileA,
    vnni::interleave,
};
use crate::gemm::{Epilogue, Im2col, Matrix};

/// Tiles of a micro-panel along one tile's depth.
const PANEL_TILES: usize = 2 * TERMS;

thread_local! {
    /// A split image, and where in it each row of the view begins. They stay allocated, so that a GEMM allocates
    /// nothing.
    static IMAGE: RefCell<(Vec<Tile>, Vec<usize>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Computes `out = image · b` with the epilogue, for `n` columns of `b`: a row of the output for each row of the view.
///
/// # Safety
/// As for [`gemm_operand`](crate::gemm::gemm_operand): `out`, `b`, the view and the epilogue's matrices are valid, and
/// no other thread accesses `out`. The CPU supports AMX.
pub(in super::super) unsafe fn gemm_im2col_lhs(
    n: usize,
    out: Matrix<*mut f32>,
    image: Im2col<'_, f32>,
    b: Matrix<*const f32>,
    epilogue: Epilogue<f32>,
) {
    IMAGE.with_borrow_mut(|(memory, row_starts)| {
        // SAFETY: the caller guarantees the view, and AMX.
        let split = unsafe { split_image::<1>(&image, image.channels(), memory) };
        let taps = &image.rows[..image.taps];
        row_starts.clear();
        (0..image.channels()).for_each(|c| row_starts.extend(taps.iter().map(|tap| c * split.group + tap)));
        let a = Im2colRows { split, row_starts, image };
        let size = GemmSize { m: image.rows.len(), k: image.columns.len(), n };
        // SAFETY: the caller guarantees the operands and an output of its own, and AMX.
        unsafe { tile_loops::gemm_operands(Bf16Isa::Amx, size, out, a, b, epilogue) };
    });
}

/// The gathering of a row of a tile from runs of adjacent elements in a split image. The first run begins the row, and
/// each further run overwrites the lanes that its mask names. Lanes behind the last run are zero.
struct GatheredRow {
    mask: u32,
    first: isize,
    /// The masks and offsets of further runs. They always fit inline, so that nothing is allocated.
    others: SmallVec<[(u32, isize); TILE_K - 1]>,
}

/// The indices at which runs of adjacent columns begin.
fn runs(columns: &[usize]) -> impl Iterator<Item = usize> {
    (0..columns.len()).filter(|&i| i == 0 || columns[i] != columns[i - 1] + 1)
}

impl GatheredRow {
    /// The row of at most 32 columns.
    fn new(columns: &[usize]) -> Self {
        let mask = u32::MAX >> (TILE_K - columns.len());
        // A run's mask reaches to the end of the row: the lanes of the runs behind it are overwritten.
        let mut runs = runs(columns).map(|i| (mask & u32::MAX << i, columns[i] as isize - i as isize));
        let first = runs.next().map_or(0, |(_, at)| at);
        GatheredRow { mask, first, others: runs.collect() }
    }

    /// # Safety
    /// `from` is valid for the row's runs, and for reads of a row's length from where each begins. The CPU supports
    /// AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(&self, from: *const u16) -> __m512i {
        // SAFETY: the caller guarantees a row's length from the beginning of each run.
        unsafe {
            let mut row = _mm512_maskz_loadu_epi16(self.mask, from.wrapping_offset(self.first).cast());
            for (mask, at) in &self.others {
                row = _mm512_mask_loadu_epi16(row, *mask, from.wrapping_offset(*at).cast());
            }
            row
        }
    }
}

/// The rows of an im2col view, in a split image.
#[derive(Clone, Copy)]
struct Im2colRows<'a> {
    split: SplitImage,
    /// The offset of each row in the split image.
    row_starts: &'a [usize],
    image: Im2col<'a, f32>,
}

/// The task that packs an A micro-panel of the view: the rows of a tile, then the next tile along the depth.
struct Im2colPacker<'a> {
    of: Im2colRows<'a>,
    rows: usize,
    to: *mut Tile,
    gathered: GatheredRow,
    /// The next row to pack, and the number of tile rows that remain.
    row: usize,
    k_tile: usize,
    remaining: usize,
}

impl<'a> Im2colPacker<'a> {
    fn new(of: Im2colRows<'a>, rows: usize, kc: usize, to: *mut Tile) -> Self {
        let columns = &of.image.columns[..kc];
        let of = Im2colRows { image: Im2col { columns, ..of.image }, ..of };
        let gathered = GatheredRow { mask: 0, first: 0, others: SmallVec::new() };
        Im2colPacker { of, rows, to, gathered, row: 0, k_tile: 0, remaining: rows * kc.div_ceil(TILE_K) }
    }
}

impl BackgroundTask for Im2colPacker<'_> {
    fn remaining(&self) -> usize {
        self.remaining
    }

    /// # Safety
    /// As for [`BackgroundTask::advance`]: a row remains, and the CPU supports AVX-512.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn advance(&mut self) {
        let Im2colRows { split, row_starts, image } = self.of;
        if self.row == 0 {
            let columns = &image.columns[self.k_tile * TILE_K..];
            self.gathered = GatheredRow::new(&columns[..columns.len().min(TILE_K)]);
        }
        let to = self.to.wrapping_add(self.k_tile * PANEL_TILES).cast::<__m512i>().wrapping_add(self.row);
        for term in 0..TERMS {
            // SAFETY: `TileA::pack` made this, whose caller guarantees view and tiles until all is packed; two tiles
            // are 32 rows.
            unsafe {
                let from = split.at.wrapping_add(row_starts[self.row] + term * split.plane);
                *to.add(term * PANEL) = interleave(self.gathered.load(from));
            }
        }
        self.row += 1;
        if self.row == self.rows {
            (self.row, self.k_tile) = (0, self.k_tile + 1);
        }
        self.remaining -= 1;
    }
}

impl TileA<f32, TERMS> for Im2colRows<'_> {
    fn offset(self, i: usize, k: usize) -> Self {
        let Im2col { rows, columns, .. } = self.image;
        let image = Im2col { rows: &rows[i..], columns: &columns[k..], ..self.image };
        Im2colRows { row_starts: &self.row_starts[i..], image, ..self }
    }

    fn in_place(&self, _: usize) -> Option<PanelTiles> {
        None
    }

    // SAFETY: `TileA` states what callers guarantee.
    unsafe fn pack(self, rows: usize, kc: usize, to: *mut Tile) -> impl BackgroundTask {
        Im2colPacker::new(self, rows, kc, to)
    }

    // SAFETY: `TileA` states what callers guarantee.
    unsafe fn element(self, i: usize, k: usize) -> f32 {
        let Im2col { at, rows, columns, .. } = self.image;
        // SAFETY: the caller guarantees row `i` and column `k` of the view.
        unsafe { *at.wrapping_add(rows[i] + columns[k]) }
    }
}
