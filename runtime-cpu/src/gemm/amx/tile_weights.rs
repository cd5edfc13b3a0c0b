//! Convolution as implicit GEMM in tiles: weights times an im2col view that nothing packs.
//!
//! A [split image](super::split_image) interleaves pairs of channels: 16 adjacent elements are a row of a tile, and 16
//! pairs of channels a tile. (Copied into micro-panels, the view took as long as its multiplications.) Gaps between two
//! rows of the output are computed and not stored.

use std::{cell::RefCell, ops::Range};

use numcore::Result;
use smallvec::SmallVec;

use super::{
    BackgroundTask, ConvSize, TILE_DIM, TILE_K, Tile,
    micro_kernel::{ImageTiles, PanelTiles, Streamed, multiply},
    pack_tiles::{PANEL, TilePacker},
    split,
    split_image::{SplitImage, TERMS, split_image},
    store_tiles::{self, OutputStore},
    tile_config::TileConfig,
    tile_loops::ACC_TILES,
};
use crate::{
    Cpu, CpuBuffer,
    gemm::{Epilogue, Im2col, Matrix},
    operand::Base,
};

/// Tiles of a micro-panel along one tile's depth.
const PANEL_TILES: usize = 2 * TERMS;
/// The depth, in tiles, after which a partial sum begins at zero: long sums stay precise.
const KC_TILES: usize = 32;
/// Bytes of packed weights that stay in L2 together while they pass over an image.
const PACKED_BYTES: usize = 1 << 19;

thread_local! {
    /// A split image, and where in it each tile of the depth begins. They stay allocated, so that a GEMM allocates
    /// nothing.
    static IMAGE: RefCell<(Vec<Tile>, Vec<usize>)> = const { RefCell::new((Vec::new(), Vec::new())) };
    /// Rows of weights, tap by tap. They stay allocated, too.
    static ROWS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Weights packed into A micro-panels, once for all images. A tile's depth is one tap in 32 channels, of which the last
/// may be missing.
pub(in super::super) struct TileWeights {
    out_channels: usize,
    k_tiles: usize,
    memory: CpuBuffer,
}

impl TileWeights {
    /// Packs contiguous weights. The CPU must support AMX.
    pub(in super::super) fn new(cpu: &Cpu, rows: Base<f32>, size: ConvSize) -> Result<TileWeights> {
        let ConvSize { groups, out_channels, channels, taps } = size;
        let k_tiles = channels.div_ceil(TILE_K) * taps;
        let (panels, k) = (out_channels.div_ceil(PANEL), channels * taps);
        let memory = cpu.scratch(groups * panels * k_tiles * PANEL_TILES * size_of::<Tile>())?;
        let to = Base::<Tile>::new(memory.ptr().cast());
        cpu.queue.engine.ranges(groups * panels, 1, |range| {
            ROWS.with_borrow_mut(|elements| {
                for panel in range {
                    let (group, first) = (panel / panels, panel % panels * PANEL);
                    let some = PANEL.min(out_channels - first);
                    elements.clear();
                    elements.resize(some * k_tiles * TILE_K, 0.0);
                    for (i, to) in elements.chunks_exact_mut(k_tiles * TILE_K).enumerate() {
                        // SAFETY: one row of the weights, which are `[groups · out_channels, k]`.
                        let row = unsafe { rows.slice(((group * out_channels + first + i) * k) as isize, k) };
                        by_tap(row, taps, to);
                    }
                    let rows = Matrix { at: elements.as_ptr(), row: (k_tiles * TILE_K) as isize, column: 1 };
                    let to = to.at((panel * k_tiles * PANEL_TILES) as isize);
                    // SAFETY: `elements` has `some` rows; the micro-panel is within the memory just taken, and this
                    // task's alone.
                    unsafe { TilePacker::a(rows, some, k_tiles * TILE_K, to).finish() };
                }
            });
        });
        Ok(TileWeights { out_channels, k_tiles, memory })
    }

    /// Computes `out = rows · image` with the epilogue, for the output channels of one group.
    ///
    /// # Safety
    /// As for [`gemm_im2col`](crate::gemm::im2col::gemm_im2col): `out`, the im2col view and the epilogue's matrices are
    /// valid, and no other thread accesses `out`. `rows` are the group's weights, which were packed.
    pub(in super::super) unsafe fn gemm(
        &self,
        group: usize,
        out: Matrix<*mut f32>,
        rows: Matrix<*const f32>,
        image: Im2col<'_, f32>,
        epilogue: Epilogue<f32>,
    ) {
        let panel_len = self.k_tiles * PANEL_TILES;
        let panels = self.out_channels.div_ceil(PANEL);
        let tiles = self.memory.ptr().cast::<Tile>().cast_const().wrapping_add(group * panels * panel_len);
        let together = (PACKED_BYTES / size_of::<Tile>() / panel_len).max(1);
        IMAGE.with_borrow_mut(|(memory, k_tiles)| {
            let blocks = image.channels().div_ceil(TILE_K);
            // SAFETY: the caller guarantees the view; there are packed weights, so the CPU supports AMX.
            let (split, _config) = unsafe { (split_image::<2>(&image, blocks * TILE_DIM, memory), TileConfig::new()) };
            tile_offsets(split, &image, k_tiles);
            let store = OutputStore::new(out, epilogue);
            let [mut acc, mut partial] = [[Tile::ZERO; ACC_TILES]; 2];
            for first in (0..panels).step_by(together) {
                b_panels(image.columns, |column, runs| {
                    for i in first..panels.min(first + together) {
                        let some = PANEL.min(self.out_channels - i * PANEL);
                        let (a_panel, rows) = (tiles.wrapping_add(i * panel_len), rows.offset(i * PANEL, 0));
                        let b_panel = SplitImage { at: split.at.wrapping_add(2 * column), ..split };
                        // SAFETY: the caller guarantees view, weights and output; this thread has a tile configuration.
                        // A B micro-panel is in the split image or in the 32 elements behind it.
                        unsafe {
                            for (i, k_tiles) in k_tiles.chunks(KC_TILES).enumerate() {
                                let a_panel = a_panel.wrapping_add(i * KC_TILES * PANEL_TILES);
                                let to = if i == 0 { &mut acc } else { &mut partial }.as_mut_ptr();
                                let a_panel = Streamed(PanelTiles::packed(a_panel, TERMS));
                                let b_panel = ImageTiles { image: b_panel, k_tiles };
                                multiply::<_, _, TERMS>((a_panel, b_panel), to, k_tiles.len(), false, || {});
                                let acc = acc.as_mut_ptr();
                                for row in 0..if i > 0 { some } else { 0 } {
                                    store_tiles::store(
                                        acc,
                                        row,
                                        store_tiles::add(acc, row, store_tiles::load(to, row)),
                                    );
                                }
                            }
                            for (lanes, j) in runs {
                                let origin = j.wrapping_sub(lanes.start);
                                let mut to = store.row([i * PANEL, origin], lanes.clone());
                                for row in 0..some {
                                    let weights = rows.offset(row, 0);
                                    let recompute = |lane: usize| {
                                        let column = image.columns[origin.wrapping_add(lane)];
                                        let element = |k: usize| *image.at.wrapping_add(image.rows[k] + column);
                                        split::recompute(|k| *weights.offset(0, k).at, element, image.rows.len())
                                    };
                                    let acc = store_tiles::load(acc.as_ptr(), row);
                                    match to.not_finite::<TERMS>(acc) {
                                        0 => to.put(acc),
                                        _ => to.put_recomputed::<TERMS>(acc, recompute),
                                    }
                                }
                            }
                        }
                    }
                });
            }
        });
    }
}

/// Copies a row of `[channels, taps]` to `[channels / 32, taps, 32]`. Missing channels are left as they are.
fn by_tap(row: &[f32], taps: usize, to: &mut [f32]) {
    for (channel, row) in row.chunks_exact(taps).enumerate() {
        let to = &mut to[channel / TILE_K * taps * TILE_K + channel % TILE_K..];
        to.iter_mut().step_by(TILE_K).zip(row).for_each(|(to, x)| *to = *x);
    }
}

/// Computes the bytes from a column to each tile of its depth.
fn tile_offsets(split: SplitImage, image: &Im2col<'_, f32>, to: &mut Vec<usize>) {
    to.clear();
    for block in 0..image.channels().div_ceil(TILE_K) {
        let taps = image.rows[..image.taps].iter();
        to.extend(taps.map(|tap| (block * TILE_DIM * split.group + 2 * tap) * size_of::<u16>()));
    }
}

/// Calls `body` for each B micro-panel of 32 adjacent elements: with its first column offset, and the runs of its lanes
/// that are columns of the view, each with its first column's index.
fn b_panels(columns: &[usize], mut body: impl FnMut(usize, &[(Range<usize>, usize)])) {
    let mut j = 0;
    while j < columns.len() {
        let first = columns[j];
        let mut runs: SmallVec<[(Range<usize>, usize); 8]> = SmallVec::new();
        while let Some(lane) = columns.get(j).map(|column| column - first).filter(|lane| *lane < PANEL) {
            match runs.last_mut() {
                Some((lanes, _)) if lanes.end == lane => lanes.end += 1,
                _ => runs.push((lane..lane + 1, j)),
            }
            j += 1;
        }
        body(first, &runs);
    }
}
