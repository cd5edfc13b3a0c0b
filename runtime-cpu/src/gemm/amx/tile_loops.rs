//! The loops of a GEMM in tiles, on one thread: B packed for L2, then A micro-panel after micro-panel against it.
//!
//! A is read in place where it is stored in tile layout. Otherwise an A micro-panel is packed while the previous one is
//! multiplied. The accumulators of a B micro-panel are rounded into the output while those of the next are computed. B
//! is packed before its first multiplication: interleaving this with the previous block's saved no time.

use std::{cell::RefCell, marker::PhantomData};

use super::{
    BackgroundTask, Bf16Isa, GemmSize, Interleaved, TILE_K, Tile,
    block_plan::{BlockPlan, BlockPosition},
    dot,
    micro_kernel::{self, PanelTiles, Streamed, multiply},
    pack_tiles::PANEL,
    split::{SplitBf16, TileElement},
    store_accumulators::StoreAccumulators,
    store_tiles::OutputStore,
    tile_config::TileConfig,
    tile_operand::{TileA, TileB},
};
use crate::{
    gemm::{Epilogue, Matrix},
    machine::Machine,
};

/// Tiles of the accumulators of one A micro-panel against one B micro-panel.
pub(super) const ACC_TILES: usize = 4;
/// KC where A is read in place. The partial sums of longer ones are kept in memory, in full precision.
const KC_IN_PLACE: usize = 4096;
/// KC where A is packed, in blocks of equal depth: packed A, packed B and partial sums stay in L2.
///
/// (With 4096, weight gradients, whose A must be transposed, took 1.1 to 1.6 times as long. With 512, sums of 1152 to
/// 2048 products took 1.05 to 1.2 times as long; with 256, shorter ones, which then have partial sums, 1.1 times.)
/// Split `f32` begins each block at zero, for the precision of the SIMD path (10 000 positive elements: 5 times more).
const KC_PACKED_A: usize = 384;
/// KC for dot products, which are 1.04 times as fast with 512.
const KC_PACKED_A_DOT: usize = 512;
const _: () = assert!(KC_PACKED_A_DOT / TILE_K <= L1_K_TILES);
/// Rows of partial sums that are kept at once: 10 MiB for the number of columns that fit.
const MAX_PARTIAL_ROWS: usize = 2048;
/// Tiles of an A micro-panel that stay in L1 while B streams past. (Split `f32` has too many terms for it. In shorter
/// micro-panels that do stay, GEMMs took 0.99 to 1.1 times as long, since the accumulators must be loaded for each.)
const L1_K_TILES: usize = 20;
/// Bytes of A that are kept packed for all blocks of B.
const PACKED_A_BYTES: usize = 16 << 20;

thread_local! {
    /// Packed B, packed A and accumulators. They stay allocated, so that a GEMM allocates nothing.
    static WORKSPACE: RefCell<[Vec<Tile>; 3]> = const { RefCell::new([const { Vec::new() }; 3]) };
}

/// Computes `out = a · b` with the epilogue, for `a: [m, k]`, `b: [k, n]`. The output has a dtype of its own: sums are
/// `f32`, and rounded where it is bf16.
///
/// # Safety
/// `a`, `b`, `out` and the epilogue's matrices are valid for their sizes. `out` overlaps none of them, and no other
/// thread accesses it during the call. The CPU supports `isa`.
pub(super) unsafe fn gemm<T: SplitBf16<TERMS>, O: TileElement, const TERMS: usize>(
    isa: Bf16Isa,
    size: GemmSize,
    out: Matrix<*mut O>,
    a: Matrix<*const T>,
    b: Matrix<*const T>,
    epilogue: Epilogue<O>,
) {
    // SAFETY: the caller guarantees valid operands and an output of its own; transposed matrices are the same memory.
    unsafe {
        if is_transposed([out.row, out.column]) {
            let (a, b, epilogue) = (a.transposed(), b.transposed(), epilogue.transposed());
            return gemm_operands(isa, size.transposed(), out.transposed(), b, a, epilogue);
        }
        gemm_operands(isa, size, out, a, b, epilogue)
    }
}

/// GEMM like [`gemm`], for any operands, and without exchanging A and B.
///
/// # Safety
/// As for [`gemm`]: valid operands, an output that overlaps none and has no other user, a CPU that supports `isa`.
pub(super) unsafe fn gemm_operands<T: SplitBf16<TERMS>, O: TileElement, const TERMS: usize>(
    isa: Bf16Isa,
    GemmSize { m, k, n }: GemmSize,
    out: Matrix<*mut O>,
    a: impl TileA<T, TERMS>,
    b: impl TileB<T, TERMS>,
    epilogue: Epilogue<O>,
) {
    WORKSPACE.with_borrow_mut(|workspace| {
        // SAFETY: the caller guarantees a CPU that supports `isa`.
        let _config = (isa == Bf16Isa::Amx).then(|| unsafe { TileConfig::new() });
        let gemm = TileGemm { isa, k, out, a, b, epilogue, elements: PhantomData };
        let most = if k > gemm.kc() { MAX_PARTIAL_ROWS } else { m };
        for i in (0..m).step_by(most) {
            // SAFETY: rows `i..i + m` of operands that the caller guarantees; the tile registers are configured above.
            unsafe { gemm.offset(i, 0).run([most.min(m - i), n], workspace) };
        }
    });
}

/// The depth of a block of `k`, where A is packed.
pub(super) fn kc_of(isa: Bf16Isa, k: usize) -> usize {
    let most = if isa == Bf16Isa::Amx { KC_PACKED_A } else { KC_PACKED_A_DOT };
    k.div_ceil(k.div_ceil(most).max(1)).next_multiple_of(TILE_K)
}

/// The number of B micro-panels that are packed at once, for blocks of depth `kc` of sums of `k` products.
pub(super) fn panels_per_block<const TERMS: usize>(k: usize, kc: usize) -> usize {
    // Most of L2; less of it where partial sums wait there, too (1.00 to 1.1 times as fast).
    let bytes = Machine::get().l2 / 8 * if k > kc { 4 } else { 5 };
    (bytes / size_of::<Tile>() / (2 * TERMS) / k.min(kc).div_ceil(TILE_K).max(1)).max(1)
}

/// Tells whether the output is column-major. The transposed GEMM is computed then, since vectors are stored along rows.
pub(super) fn is_transposed([row, column]: [isize; 2]) -> bool {
    column != 1 && row == 1
}

/// A GEMM on one thread, or the part of it that begins at some row and column of the output.
#[derive(Clone, Copy)]
pub(super) struct TileGemm<T, O, A, B, const TERMS: usize> {
    isa: Bf16Isa,
    pub(super) k: usize,
    out: Matrix<*mut O>,
    pub(super) a: A,
    pub(super) b: B,
    epilogue: Epilogue<O>,
    elements: PhantomData<T>,
}

/// Vector work between multiplications: storing the last accumulators, and packing the next A micro-panel.
struct Background<S, A> {
    store: Interleaved<S>,
    pack: Interleaved<A>,
    /// The two buffers of accumulators that are stored at once: one for the next, and one that is being stored.
    acc: [*mut Tile; 2],
}

impl<S: BackgroundTask, A: BackgroundTask> Background<S, A> {
    /// The background work after every four multiplications of tiles.
    ///
    /// # Safety
    /// The CPU supports the tasks' instructions, as for [`Interleaved::tick`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn tick(&mut self) {
        // SAFETY: the caller guarantees the instructions.
        unsafe {
            self.store.tick();
            self.pack.tick();
        }
    }
}

impl<T, O, A, B, const TERMS: usize> TileGemm<T, O, A, B, TERMS>
where
    T: SplitBf16<TERMS>,
    O: TileElement,
    A: TileA<T, TERMS>,
    B: TileB<T, TERMS>,
{
    /// Tiles of a micro-panel along one tile's depth.
    const PANEL_TILES: usize = 2 * TERMS;

    /// The part of the output from row `i` and column `j` on.
    fn offset(&self, i: usize, j: usize) -> Self {
        TileGemm {
            out: self.out.offset(i, j),
            a: self.a.offset(i, 0),
            b: self.b.offset(0, j),
            epilogue: self.epilogue.offset(i, j),
            ..*self
        }
    }

    fn plan(&self, [m, n]: [usize; 2]) -> BlockPlan {
        let (k, kc) = (self.k, self.kc());
        let blocks = n.div_ceil(panels_per_block::<TERMS>(k, kc) * PANEL);
        let nc = n.div_ceil(blocks).next_multiple_of(PANEL);
        // Reading split `f32` takes 1.5 times the bytes: keeping it is no faster than splitting it again.
        let keeps_a = TERMS == 1 && n > nc && k <= kc && m * k * size_of::<u16>() <= PACKED_A_BYTES;
        BlockPlan { size: GemmSize { m, k, n }, kc, nc, keeps_a }
    }

    /// # Safety
    /// As for [`gemm`], on a thread whose tile registers are configured if `isa` is AMX.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn run(&self, sizes: [usize; 2], [packed_b, packed_a, acc]: &mut [Vec<Tile>; 3]) {
        let plan = self.plan(sizes);
        let ([k_tiles, panels], m) = (plan.tiles(), plan.size.m);
        let mut at = BlockPosition { column: 0, k: 0, row: 0 };
        let packed_b = workspace(packed_b, panels * k_tiles * Self::PANEL_TILES);
        let (panel_len, count) = (k_tiles * Self::PANEL_TILES, if plan.keeps_a { m.div_ceil(PANEL) } else { 2 });
        let packed_a = workspace(packed_a, panel_len * count);
        let partials = if plan.has_partials() { m.div_ceil(PANEL) } else { 1 };
        let acc = workspace(acc, (2 + partials * panels) * ACC_TILES);
        let store = OutputStore::new(self.out, self.epilogue);

        // SAFETY: the caller guarantees valid operands; the workspaces hold a micro-panel before it is multiplied.
        unsafe {
            let pack = |at: BlockPosition, turn: usize| {
                let (a, rows) = (self.a.offset(at.row, at.k), plan.rows(at));
                let slot = if plan.keeps_a { at.row / PANEL } else { turn % 2 };
                let to = packed_a.wrapping_add(slot * panel_len);
                let in_place = if rows == PANEL { a.in_place(self.k) } else { None };
                let is_ready = in_place.is_some() || plan.keeps_a && at.column > 0;
                let tiles = in_place.unwrap_or(PanelTiles::packed(to, TERMS));
                (tiles, (!is_ready).then(|| a.pack(rows, plan.kc(at), to)))
            };
            let (mut a_panel, first) = pack(at, 0);
            if let Some(mut first) = first {
                first.finish();
            }
            let buffers = [acc, acc.add(ACC_TILES)];
            let mut background = Background { store: Interleaved::none(), pack: Interleaved::none(), acc: buffers };
            for turn in 1.. {
                if at.row == 0 {
                    // Partial sums of this block of columns may be stored where those of the next will be.
                    background.store.finish();
                    self.b.offset(at.k, at.column).pack(plan.kc(at), plan.nc(at), packed_b).finish();
                }
                let next = plan.next(at);
                let (next_panel, packing) = next.map_or((a_panel, None), |next| pack(next, turn));
                let k_tiles = plan.nc(at).div_ceil(PANEL) * plan.kc(at).div_ceil(TILE_K);
                background.pack = Interleaved::new(packing, k_tiles * micro_kernel::slots_per_k_tile(TERMS));
                let partials = if plan.has_partials() { at.row / PANEL * panels } else { 0 };
                let block =
                    PanelBlock { a_panel, packed_b, acc: acc.add((2 + partials) * ACC_TILES), store: &store, at };
                self.a_panel(&plan, block, &mut background);
                background.pack.finish();
                let Some(next) = next else { break };
                (at, a_panel) = (next, next_panel);
            }
            background.store.finish();
        }
    }

    /// The depth of a block of `k`.
    fn kc(&self) -> usize {
        if self.a.in_place(self.k).is_some() { KC_IN_PLACE } else { kc_of(self.isa, self.k).max(TILE_K) }
    }

    /// Multiplies one A micro-panel by all packed B micro-panels.
    ///
    /// # Safety
    /// As for [`TileGemm::run`], and the block's micro-panels are packed.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn a_panel<'a>(
        &'a self,
        plan: &BlockPlan,
        block: PanelBlock<'a, O>,
        background: &mut Background<StoreAccumulators<'a, T, O, A, B, TERMS>, impl BackgroundTask>,
    ) {
        let PanelBlock { a_panel, packed_b, acc, store, at } = block;
        let (all, columns) = (plan.kc(at).div_ceil(TILE_K), plan.nc(at));
        let most = all.div_ceil(all.div_ceil(L1_K_TILES).max(1)).max(1);
        let (continues, complete) = (at.k > 0, at.k + plan.kc >= self.k);
        for first in (0..all.max(1)).step_by(most) {
            let k_tiles = most.min(all - first);
            let last = complete && first + k_tiles == all;
            let a_panel = a_panel.offset(first);
            for panel in 0..columns.div_ceil(PANEL) {
                let b = packed_b.wrapping_add((panel * all + first) * Self::PANEL_TILES);
                let partials = acc.wrapping_add(panel * ACC_TILES);
                // Split `f32` begins each block at zero and adds it to the partial sums of those before.
                let adds_partials = TERMS > 1 && continues;
                // Accumulators that are stored at once stay in L1 until then, while the next ones are computed.
                let stored_at_once = adds_partials || last && k_tiles == all && !continues;
                let to = if stored_at_once { background.acc[0] } else { partials };
                let accumulate = first > 0 || continues && !adds_partials;
                // SAFETY: the caller guarantees the micro-panels; `run` made workspace for the accumulators of each.
                unsafe {
                    // With one B micro-panel, the partial sums being stored may be those that this one accumulates.
                    if columns <= PANEL && !stored_at_once {
                        background.store.finish();
                    }
                    let panels = (a_panel, PanelTiles::packed(b, TERMS));
                    self.multiply(panels, to, k_tiles, accumulate, || background.tick());
                    background.store.finish();
                    if last || adds_partials {
                        background.acc.reverse();
                        let begin = [at.row, at.column + panel * PANEL];
                        let finish = StoreAccumulators {
                            gemm: self,
                            to: last.then(|| store.row(begin, 0..PANEL.min(columns - panel * PANEL))),
                            at: begin,
                            acc: to,
                            partials: adds_partials.then_some(partials),
                            row: 0,
                            rows: plan.rows(at),
                        };
                        let slots = k_tiles * micro_kernel::slots_per_k_tile(TERMS);
                        background.store = Interleaved::new(Some(finish), slots);
                    }
                }
            }
        }
    }

    /// Multiplies one A micro-panel by one B micro-panel. `background` is called between multiplications.
    ///
    /// # Safety
    /// As for [`multiply`]: valid micro-panels and accumulators, and configured tile registers if `isa` is AMX.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn multiply(
        &self,
        (a, b): (PanelTiles, PanelTiles),
        acc: *mut Tile,
        k_tiles: usize,
        accumulate: bool,
        mut background: impl FnMut(),
    ) {
        // SAFETY: the caller guarantees micro-panels, accumulators and tile registers.
        unsafe {
            match self.isa {
                Bf16Isa::Amx => multiply::<_, _, TERMS>((a, Streamed(b)), acc, k_tiles, accumulate, background),
                Bf16Isa::Dot => {
                    dot::multiply(a, b.at.cast(), acc, k_tiles, accumulate);
                    (0..k_tiles * micro_kernel::slots_per_k_tile(TERMS)).for_each(|_| background());
                }
            }
        }
    }
}

/// An A micro-panel, the packed B by which it is multiplied, and the destination of its accumulators.
struct PanelBlock<'a, O> {
    a_panel: PanelTiles,
    packed_b: *const Tile,
    /// Partial sums against every B micro-panel.
    acc: *mut Tile,
    store: &'a OutputStore<O>,
    at: BlockPosition,
}

/// The first `count` tiles of `tiles`, which grows as needed.
pub(super) fn workspace(tiles: &mut Vec<Tile>, count: usize) -> *mut Tile {
    if tiles.len() < count {
        tiles.resize(count, Tile::ZERO);
    }
    tiles.as_mut_ptr()
}
