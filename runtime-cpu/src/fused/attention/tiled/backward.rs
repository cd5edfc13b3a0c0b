//! Gradients by AMX, in the same blocks. The gradients of keys and values are computed transposed, `dkᵀ = qᵀ·dS` and
//! `dvᵀ = gᵀ·P`. So weights go into the tiles of a B operand, which pair two queries, and need no transposition.

use std::{arch::x86_64::*, ops::Range};

use numcore::Result;

use super::{
    super::{
        backward::{BackwardHead, QUERIES, dots_of},
        *,
    },
    KEY_PANELS, PANEL, PREFETCH_ROWS, Scores,
    score_grads::ScoreGrads,
    store_rows, tiles, tiles_len,
};
use crate::{
    gemm::{Interleaved, SplitBf16, Tile, TileUnit},
    simd::prefetch,
    simd::read_transposed,
};

/// Micro-panels of queries that contribute to gradients of keys at once: two blocks of them, of three terms, still
/// leave most of L2.
pub(super) const QUERY_PANELS: usize = 2;

/// Runs one task: these keys, and all heads that share them.
pub(in super::super) fn keys<T: SplitBf16<TERMS>, const TERMS: usize>(
    call: &FusedCall<'_>,
    p: &AttentionProblem,
    heads: &[BackwardHead<'_, T>],
    mine: Range<usize>,
) -> Result<()> {
    let Some(amx) = TileUnit::<TERMS>::new(call.engine().simd) else { return Ok(()) };
    let [depth_panels, value_panels] = [p.depth, p.value_depth].map(|n| n.div_ceil(PANEL));
    let query_panels = p.queries.div_ceil(PANEL);
    let operands = [
        KEY_PANELS * depth_panels,
        KEY_PANELS * value_panels,
        depth_panels * KEY_PANELS,
        depth_panels,
        value_panels,
        QUERY_PANELS,
        2 * KEY_PANELS,
        2 * KEY_PANELS * QUERY_PANELS,
        2 * KEY_PANELS * QUERY_PANELS,
    ];
    let blocks = [
        2 * KEY_PANELS,
        2 * KEY_PANELS,
        depth_panels * KEY_PANELS,
        value_panels * KEY_PANELS,
        p.group * query_panels * depth_panels,
    ];
    let others = [p.group * p.queries, staging::<T>(QUERIES * p.value_depth), staging::<T>(QUERIES * p.value_depth)];
    let operands = operands.into_iter().map(|k_tiles| tiles_len(k_tiles * TileUnit::<TERMS>::PANEL_TILES));
    let mut sizes = operands.chain(blocks.map(|n| tiles_len(n * 4))).chain(others);
    let mut scratch = Scratch::<f32, 17>::new(call.cpu, std::array::from_fn(|_| sizes.next().unwrap_or(0)))?;
    let [kt, vt, k, q, g, transposed, ds_left, weights, ds_right, s, ds, dk, dv, dq, dots, g_staging, o_staging] =
        scratch.buffers();
    dq.fill(0.0);
    for (h, dots) in heads.iter().zip(dots.chunks_mut(p.queries.max(1))) {
        // SAFETY: the head's matrices have all queries.
        unsafe { dots_of(call.engine().simd, p, h, [g_staging, o_staging], dots) };
    }
    let dq = tiles(dq);
    for keys in chunks_of(mine, KEYS) {
        let Some(any) = heads.first() else { break };
        let n = keys.len();
        dk.fill(0.0);
        dv.fill(0.0);
        let block = KeyBlock {
            amx: &amx,
            p,
            heads,
            dots,
            keys: keys.clone(),
            sizes: [depth_panels, value_panels],
            right: [&mut *kt, &mut *vt, &mut *k].map(tiles),
            left: [&mut *q, &mut *g].map(tiles),
            transposed: tiles(transposed),
            acc: [&mut *s, &mut *ds].map(tiles),
            ds_left: tiles(ds_left),
            columns: [&mut *weights, &mut *ds_right].map(tiles),
            dq,
            dk: [&mut *dv, &mut *dk].map(tiles),
        };
        // SAFETY: the operands have these keys; the tiles are this task's scratch.
        unsafe {
            let [key, value] = [any.k, any.v].map(|m| m.offset(keys.start, 0));
            amx.pack_b(key.transposed(), (p.depth, n), block.right[0]);
            amx.pack_b(value.transposed(), (p.value_depth, n), block.right[1]);
            amx.pack_b(key, (n, p.depth), block.right[2]);
            block.run();
        }
        for (acc, out, width, scale) in
            [(&mut *dk, any.dk, p.depth, p.scale as f32), (&mut *dv, any.dv, p.value_depth, 1.0)]
        {
            // SAFETY: these keys' gradients, which are this task's alone; the CPU supports the instructions.
            unsafe { store_columns(tiles(acc), out.offset(keys.start, 0), (n, width), scale) };
        }
    }
    for (i, h) in heads.iter().enumerate() {
        for (query_panel, step) in chunks(p.queries, PANEL).enumerate() {
            let (acc, scale) = (dq.wrapping_add((i * query_panels + query_panel) * depth_panels * 4), p.scale as f32);
            // SAFETY: these queries' gradients, which are this task's alone; the CPU supports the instructions.
            let _ = unsafe {
                match h.rounded {
                    Some(out) => store_rows(acc, out.offset(step.start, 0), p.depth, &[scale; PANEL][..step.len()]),
                    None => store_rows(acc, h.dq.offset(step.start, 0), p.depth, &[scale; PANEL][..step.len()]),
                }
            };
        }
    }
    Ok(())
}

/// A block of keys: tiles of its operands, and those in which micro-panels of queries are computed.
struct KeyBlock<'a, T: Stored, const TERMS: usize> {
    amx: &'a TileUnit<TERMS>,
    p: &'a AttentionProblem,
    heads: &'a [BackwardHead<'a, T>],
    dots: &'a [f32],
    keys: Range<usize>,
    /// Micro-panels of the depth, and of the value depth.
    sizes: [usize; 2],
    /// B operands: keys and values transposed, and keys.
    right: [*mut Tile; 3],
    /// A micro-panels of queries and of upstream gradients.
    left: [*mut Tile; 2],
    /// Upstream gradients or queries of a few micro-panels, transposed.
    transposed: *mut Tile,
    /// Accumulators of scores and of gradients of weights, for two micro-panels.
    acc: [*mut Tile; 2],
    /// A operands: gradients of scores of two micro-panels.
    ds_left: *mut Tile,
    /// B operands: weights and gradients of scores, for two times a few micro-panels.
    columns: [*mut Tile; 2],
    dq: *mut Tile,
    /// Gradients of values and of keys.
    dk: [*mut Tile; 2],
}

/// A micro-panel of queries that see any of the keys.
#[derive(Clone, Copy)]
struct QueryPanel {
    head: usize,
    /// The index of this micro-panel in the head.
    at: usize,
    /// The index of its accumulators, among two.
    place: usize,
    /// The index of this micro-panel in the group of micro-panels that contribute at once.
    slot: usize,
    /// The index of the buffers of that group, among two.
    half: usize,
}

impl<T: SplitBf16<TERMS>, const TERMS: usize> KeyBlock<'_, T, TERMS> {
    /// Software pipelining over micro-panels of queries. While the scores of one become gradients, AMX computes the
    /// scores of the next, and the contributions of the previous one to gradients of queries and, together with others,
    /// of keys.
    ///
    /// # Safety
    /// The matrices have these keys and all queries; no other thread accesses the tiles.
    unsafe fn run(&self) {
        let query_panels = self.p.queries.div_ceil(PANEL);
        let first = (0..query_panels).find(|&at| self.seen(at).last > 0).unwrap_or(query_panels);
        let each = query_panels - first;
        let all = self.heads.len() * each;
        let panel_of = |turn: usize| {
            let (head, i) = (turn / each, turn % each);
            let half = head * each.div_ceil(QUERY_PANELS) + i / QUERY_PANELS;
            QueryPanel { head, at: first + i, place: turn % 2, slot: i % QUERY_PANELS, half: half % 2 }
        };
        for turn in 0..all + 2 {
            let before = |turns: usize| turn.checked_sub(turns).filter(|&t| t < all).map(panel_of);
            let [ahead, here, behind] = [0, 1, 2].map(before);
            let full = behind.filter(|s| s.slot + 1 == QUERY_PANELS || s.at + 1 == query_panels);
            let [depth_panels, value_panels] = self.sizes;
            let k_tiles = [(ahead, depth_panels + value_panels), (behind, depth_panels)]
                .map(|(s, n)| s.map_or(0, |s| self.scores(s).panels() * n));
            let added = full.map_or(0, |s| {
                self.added(s).map(|(_, from)| s.slot + 1 - from).sum::<usize>() * (depth_panels + value_panels)
            });
            let task = here.map(|s| self.score_grads(s));
            let mut background =
                Interleaved::new(task, (k_tiles.iter().sum::<usize>() + added) * TileUnit::<TERMS>::SLOTS);
            // SAFETY: the caller guarantees keys and queries; consecutive micro-panels have tiles of their own.
            unsafe {
                ahead.into_iter().for_each(|s| self.add_scores(s, &mut background));
                behind.into_iter().for_each(|s| self.add_queries(s, &mut background));
                full.into_iter().for_each(|s| self.add_keys(s, &mut background));
                background.finish();
            }
        }
    }

    fn rows(&self, at: usize) -> Range<usize> {
        at * PANEL..self.p.queries.min((at + 1) * PANEL)
    }

    fn seen(&self, at: usize) -> Seen {
        self.p.seen_by(&self.rows(at), &self.keys)
    }

    fn scores(&self, s: QueryPanel) -> Scores {
        let scale = (self.p.scale * std::f64::consts::LOG2_E) as f32;
        Scores { tiles: self.acc[0].wrapping_add(s.place * KEY_PANELS * 4), scale, seen: self.seen(s.at) }
    }

    fn grads(&self, s: QueryPanel) -> *mut Tile {
        self.acc[1].wrapping_add(s.place * KEY_PANELS * 4)
    }

    fn ds_left(&self, s: QueryPanel) -> *mut Tile {
        self.ds_left.wrapping_add(s.place * KEY_PANELS * TileUnit::<TERMS>::PANEL_TILES)
    }

    fn score_grads(&self, s: QueryPanel) -> ScoreGrads<'_, TERMS> {
        let rows = self.rows(s.at);
        let slot = (s.half * KEY_PANELS * QUERY_PANELS + s.slot) * TileUnit::<TERMS>::PANEL_TILES;
        ScoreGrads {
            scores: self.scores(s),
            grads: self.grads(s),
            right: self.columns.map(|x| x.wrapping_add(slot)),
            left: self.ds_left(s),
            lse: &self.heads[s.head].lse[rows.clone()],
            dots: &self.dots[s.head * self.p.queries..][rows],
            done: 0,
            // SAFETY: zeros are such registers.
            first: unsafe { std::mem::zeroed() },
        }
    }

    /// Computes scores and gradients of weights.
    ///
    /// # Safety
    /// As for [`run`](KeyBlock::run), on a CPU with AMX.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn add_scores(&self, s: QueryPanel, background: &mut Interleaved<ScoreGrads<'_, TERMS>>) {
        let (h, rows, scores) = (&self.heads[s.head], self.rows(s.at), self.scores(s));
        let factors = [(h.q, self.p.depth, scores.tiles.cast_mut()), (h.g, self.p.value_depth, self.grads(s))];
        for (((x, width, acc), left), right) in factors.into_iter().zip(self.left).zip(self.right) {
            let k_tiles = width.div_ceil(PANEL);
            // SAFETY: the caller guarantees these queries, and tiles of this task's alone.
            unsafe {
                self.amx.pack_a(x.offset(rows.start, 0), (rows.len(), width), left);
                for panel in 0..scores.panels() {
                    let right = right.add(panel * k_tiles * TileUnit::<TERMS>::PANEL_TILES);
                    self.amx.multiply((left, right), acc.add(panel * 4), k_tiles, false, || background.tick());
                }
            }
        }
    }

    /// Accumulates the contributions of a micro-panel to gradients of its queries.
    ///
    /// # Safety
    /// As for [`run`](KeyBlock::run), on a CPU with AMX.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn add_queries(&self, s: QueryPanel, background: &mut Interleaved<ScoreGrads<'_, TERMS>>) {
        let depth_panels = self.sizes[0];
        for panel in 0..depth_panels {
            // SAFETY: the caller guarantees tiles of this task's alone, which hold these micro-panels.
            unsafe {
                let k = self.right[2].add(panel * self.keys.len().div_ceil(PANEL) * TileUnit::<TERMS>::PANEL_TILES);
                let query_panel = s.head * self.p.queries.div_ceil(PANEL) + s.at;
                let (acc, k_tiles) = (self.dq.add((query_panel * depth_panels + panel) * 4), self.scores(s).panels());
                self.amx.multiply((self.ds_left(s), k), acc, k_tiles, true, || background.tick());
            }
        }
    }

    /// The micro-panels of keys that the last of a few micro-panels of queries sees; with each the first of those that
    /// sees any of its keys.
    fn added(&self, last: QueryPanel) -> impl Iterator<Item = (usize, usize)> {
        let first = last.at - last.slot;
        (0..self.scores(last).panels()).map(move |panel| {
            let sees = |&slot: &usize| self.seen(first + slot).last > panel * PANEL;
            (panel, (0..last.slot).find(sees).unwrap_or(last.slot))
        })
    }

    /// Accumulates the contributions of a few micro-panels to gradients of values and keys.
    ///
    /// # Safety
    /// As for [`run`](KeyBlock::run), on a CPU with AMX.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn add_keys(&self, last: QueryPanel, background: &mut Interleaved<ScoreGrads<'_, TERMS>>) {
        let h = &self.heads[last.head];
        let rows = self.rows(last.at - last.slot).start..self.rows(last.at).end;
        let step = TileUnit::<TERMS>::PANEL_TILES;
        let factors = [(h.g, self.p.value_depth), (h.q, self.p.depth)];
        for ((x, width), (right, acc)) in factors.into_iter().zip(self.columns.into_iter().zip(self.dk)) {
            for (depth_panel, part) in chunks(width, PANEL).enumerate() {
                // SAFETY: the caller guarantees these queries, and tiles of this task's alone.
                unsafe {
                    let left = self.transposed;
                    self.amx.pack_a(x.offset(rows.start, part.start).transposed(), (part.len(), rows.len()), left);
                    for (panel, from) in self.added(last) {
                        let right = right.add(((last.half * KEY_PANELS + panel) * QUERY_PANELS + from) * step);
                        let (acc, k_tiles) = (acc.add((depth_panel * KEY_PANELS + panel) * 4), last.slot + 1 - from);
                        self.amx.multiply((left.add(from * step), right), acc, k_tiles, true, || background.tick());
                    }
                }
            }
        }
    }
}

/// Transposes accumulators, scales them and rounds them into rows of the output.
///
/// # Safety
/// `out` is valid for `[rows, columns]` elements, which no other thread accesses, and `acc` for their tiles. The CPU
/// supports AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn store_columns<T: SplitBf16<TERMS>, const TERMS: usize>(
    acc: *const Tile,
    out: Matrix<*mut T>,
    (rows, columns): (usize, usize),
    scale: f32,
) {
    for (i, j) in chunks(rows, 16).flat_map(|i| chunks(columns, 16).map(move |j| (i.clone(), j))) {
        let panel = (j.start / PANEL * KEY_PANELS + i.start / PANEL) * 4;
        let tile = panel + j.start / 16 % 2 * 2 + i.start / 16 % 2;
        let mask = u32::from(u16::MAX >> (16 - j.len()));
        // SAFETY: rows `i` and columns `j` of the output, and their tile, which the caller guarantees.
        unsafe {
            let rows = read_transposed(acc.add(tile).cast(), size_of::<__m512i>() as isize);
            for (at, row) in i.zip(rows) {
                prefetch(out.offset(at + PREFETCH_ROWS, j.start).at, j.len());
                let x = _mm512_mul_ps(_mm512_castsi512_ps(row), _mm512_set1_ps(scale));
                T::store_f32(out.offset(at, j.start).at, mask, [x, _mm512_setzero_ps()]);
            }
        }
    }
}
