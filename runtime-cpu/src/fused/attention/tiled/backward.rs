//! Gradients, in the same blocks. Those of keys and values are made in columns, `dkᵀ = qᵀ·dS` and `dvᵀ = gᵀ·P`: so weights go into a right
//! operand's tiles, where two queries lie side by side, and not into turned ones.

use std::{arch::x86_64::*, ops::Range};

use numcore::Result;

use super::{
    super::{
        backward::{Head, QUERIES, dots_of},
        *,
    },
    AHEAD, PANELS, SIDE, Scores, room, rows_out,
    score_grads::ScoreGrads,
    tiles,
};
use crate::{
    gemm::{Interleaved, Split, Tile, TileUnit},
    simd::prefetch,
    simd::read_transposed,
};

/// Strips of queries that are added up at once for their keys: two blocks of them, in three pieces, still leave most of an L2.
pub(super) const STRIPS: usize = 2;

/// One task: these keys, and all heads that share them.
pub(in super::super) fn keys<T: Split<TERMS>, const TERMS: usize>(
    call: &Call<'_>,
    p: &Problem,
    heads: &[Head<'_, T>],
    mine: Range<usize>,
) -> Result<()> {
    let Some(amx) = TileUnit::<TERMS>::new(call.engine().simd) else { return Ok(()) };
    let [deep, wide] = [p.depth, p.value_depth].map(|n| n.div_ceil(SIDE));
    let strips = p.queries.div_ceil(SIDE);
    let operands = [
        PANELS * deep,
        PANELS * wide,
        deep * PANELS,
        deep,
        wide,
        STRIPS,
        2 * PANELS,
        2 * PANELS * STRIPS,
        2 * PANELS * STRIPS,
    ];
    let blocks = [2 * PANELS, 2 * PANELS, deep * PANELS, wide * PANELS, p.group * strips * deep];
    let others = [p.group * p.queries, aside::<T>(QUERIES * p.value_depth), aside::<T>(QUERIES * p.value_depth)];
    let operands = operands.into_iter().map(|steps| room(steps * TileUnit::<TERMS>::PANEL_TILES));
    let mut sizes = operands.chain(blocks.map(|n| room(n * 4))).chain(others);
    let mut scratch = Scratch::<f32, 17>::new(call.cpu, std::array::from_fn(|_| sizes.next().unwrap_or(0)))?;
    let [kt, vt, k, q, g, transposed, ds_left, weights, ds_right, s, ds, dk, dv, dq, dots, wide_g, wide_o] =
        scratch.parts();
    dq.fill(0.0);
    for (h, dots) in heads.iter().zip(dots.chunks_mut(p.queries.max(1))) {
        // SAFETY: these queries of the operands.
        unsafe { dots_of(call.engine().simd, p, h, [wide_g, wide_o], dots) };
    }
    let dq = tiles(dq);
    for keys in parts(mine, KEYS) {
        let Some(any) = heads.first() else { break };
        let n = keys.len();
        dk.fill(0.0);
        dv.fill(0.0);
        let block = Block {
            amx: &amx,
            p,
            heads,
            dots,
            keys: keys.clone(),
            sizes: [deep, wide],
            right: [&mut *kt, &mut *vt, &mut *k].map(tiles),
            left: [&mut *q, &mut *g].map(tiles),
            transposed: tiles(transposed),
            sums: [&mut *s, &mut *ds].map(tiles),
            ds_left: tiles(ds_left),
            columns: [&mut *weights, &mut *ds_right].map(tiles),
            dq,
            dk: [&mut *dv, &mut *dk].map(tiles),
        };
        // SAFETY: these keys of the operands, and tiles of this task's.
        unsafe {
            let [key, value] = [any.k, any.v].map(|m| m.offset(keys.start, 0));
            amx.pack_b(key.transposed(), (p.depth, n), block.right[0]);
            amx.pack_b(value.transposed(), (p.value_depth, n), block.right[1]);
            amx.pack_b(key, (n, p.depth), block.right[2]);
            block.run();
        }
        for (sums, out, width, scale) in
            [(&mut *dk, any.dk, p.depth, p.scale as f32), (&mut *dv, any.dv, p.value_depth, 1.0)]
        {
            // SAFETY: these keys' gradients, which are this task's alone; the CPU supports the instructions.
            unsafe { columns_out(tiles(sums), out.offset(keys.start, 0), (n, width), scale) };
        }
    }
    for (i, h) in heads.iter().enumerate() {
        for (strip, step) in pieces(p.queries, SIDE).enumerate() {
            let (sums, scale) = (dq.wrapping_add((i * strips + strip) * deep * 4), p.scale as f32);
            // SAFETY: these queries' gradients, which are this task's alone; the CPU supports the instructions.
            let _ = unsafe {
                match h.rounded {
                    Some(out) => rows_out(sums, out.offset(step.start, 0), p.depth, &[scale; SIDE][..step.len()]),
                    None => rows_out(sums, h.dq.offset(step.start, 0), p.depth, &[scale; SIDE][..step.len()]),
                }
            };
        }
    }
    Ok(())
}

/// A block of keys, with tiles of its operands, and those in which strips of queries are computed.
struct Block<'a, T: Stored, const TERMS: usize> {
    amx: &'a TileUnit<TERMS>,
    p: &'a Problem,
    heads: &'a [Head<'a, T>],
    dots: &'a [f32],
    keys: Range<usize>,
    /// Panels of the depth, and of values.
    sizes: [usize; 2],
    /// Keys and values in columns, keys in rows.
    right: [*mut Tile; 3],
    /// A strip of queries and of upstream gradients.
    left: [*mut Tile; 2],
    /// Columns of upstream gradients or queries of a few strips.
    transposed: *mut Tile,
    /// Scores and gradients of weights, of two strips.
    sums: [*mut Tile; 2],
    /// Gradients of scores in rows, of two strips.
    ds_left: *mut Tile,
    /// Weights and gradients of scores, twice a few strips of them.
    columns: [*mut Tile; 2],
    dq: *mut Tile,
    /// Gradients of values and of keys.
    dk: [*mut Tile; 2],
}

/// A strip of queries that see any of the keys.
#[derive(Clone, Copy)]
struct Strip {
    head: usize,
    /// Among the head's strips.
    at: usize,
    /// Which of two places its sums have.
    place: usize,
    /// Among those that are added up at once.
    slot: usize,
    /// Which of two places those have.
    half: usize,
}

impl<T: Split<TERMS>, const TERMS: usize> Block<'_, T, TERMS> {
    /// While a strip's scores become gradients, those of the strip after it are added up, and what the one before gives to its queries and,
    /// with others, to the keys.
    ///
    /// # Safety
    /// The matrices have these keys and all queries; the tiles are nobody else's.
    unsafe fn run(&self) {
        let strips = self.p.queries.div_ceil(SIDE);
        let first = (0..strips).find(|&at| self.seen(at).last > 0).unwrap_or(strips);
        let each = strips - first;
        let all = self.heads.len() * each;
        let strip = |turn: usize| {
            let (head, i) = (turn / each, turn % each);
            let half = head * each.div_ceil(STRIPS) + i / STRIPS;
            Strip { head, at: first + i, place: turn % 2, slot: i % STRIPS, half: half % 2 }
        };
        for turn in 0..all + 2 {
            let before = |turns: usize| turn.checked_sub(turns).filter(|&t| t < all).map(strip);
            let [ahead, here, behind] = [0, 1, 2].map(before);
            let full = behind.filter(|s| s.slot + 1 == STRIPS || s.at + 1 == strips);
            let [deep, wide] = self.sizes;
            let steps =
                [(ahead, deep + wide), (behind, deep)].map(|(s, n)| s.map_or(0, |s| self.scores(s).panels() * n));
            let added =
                full.map_or(0, |s| self.added(s).map(|(_, from)| s.slot + 1 - from).sum::<usize>() * (deep + wide));
            let work = here.map(|s| self.score_grads(s));
            let mut beside = Interleaved::new(work, (steps.iter().sum::<usize>() + added) * TileUnit::<TERMS>::SLOTS);
            // SAFETY: the caller's promise; strips that follow each other have tiles of their own.
            unsafe {
                ahead.into_iter().for_each(|s| self.add_scores(s, &mut beside));
                behind.into_iter().for_each(|s| self.add_queries(s, &mut beside));
                full.into_iter().for_each(|s| self.add_keys(s, &mut beside));
                beside.finish();
            }
        }
    }

    fn rows(&self, at: usize) -> Range<usize> {
        at * SIDE..self.p.queries.min((at + 1) * SIDE)
    }

    fn seen(&self, at: usize) -> Seen {
        self.p.seen_by(&self.rows(at), &self.keys)
    }

    fn scores(&self, s: Strip) -> Scores {
        let scale = (self.p.scale * std::f64::consts::LOG2_E) as f32;
        Scores { tiles: self.sums[0].wrapping_add(s.place * PANELS * 4), scale, seen: self.seen(s.at) }
    }

    fn grads(&self, s: Strip) -> *mut Tile {
        self.sums[1].wrapping_add(s.place * PANELS * 4)
    }

    fn ds_left(&self, s: Strip) -> *mut Tile {
        self.ds_left.wrapping_add(s.place * PANELS * TileUnit::<TERMS>::PANEL_TILES)
    }

    fn score_grads(&self, s: Strip) -> ScoreGrads<'_, TERMS> {
        let rows = self.rows(s.at);
        let slot = (s.half * PANELS * STRIPS + s.slot) * TileUnit::<TERMS>::PANEL_TILES;
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

    /// Scores and gradients of weights.
    ///
    /// # Safety
    /// As for [`run`](Block::run).
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn add_scores(&self, s: Strip, beside: &mut Interleaved<ScoreGrads<'_, TERMS>>) {
        let (h, rows, scores) = (&self.heads[s.head], self.rows(s.at), self.scores(s));
        let factors = [(h.q, self.p.depth, scores.tiles.cast_mut()), (h.g, self.p.value_depth, self.grads(s))];
        for (((x, width, sums), left), right) in factors.into_iter().zip(self.left).zip(self.right) {
            let steps = width.div_ceil(SIDE);
            // SAFETY: the caller's promise.
            unsafe {
                self.amx.pack_a(x.offset(rows.start, 0), (rows.len(), width), left);
                for panel in 0..scores.panels() {
                    let right = right.add(panel * steps * TileUnit::<TERMS>::PANEL_TILES);
                    self.amx.multiply((left, right), sums.add(panel * 4), steps, false, || beside.tick());
                }
            }
        }
    }

    /// What a strip adds to gradients of its queries.
    ///
    /// # Safety
    /// As for [`run`](Block::run).
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn add_queries(&self, s: Strip, beside: &mut Interleaved<ScoreGrads<'_, TERMS>>) {
        let deep = self.sizes[0];
        for panel in 0..deep {
            // SAFETY: the caller's promise.
            unsafe {
                let k = self.right[2].add(panel * self.keys.len().div_ceil(SIDE) * TileUnit::<TERMS>::PANEL_TILES);
                let strip = s.head * self.p.queries.div_ceil(SIDE) + s.at;
                let (sums, steps) = (self.dq.add((strip * deep + panel) * 4), self.scores(s).panels());
                self.amx.multiply((self.ds_left(s), k), sums, steps, true, || beside.tick());
            }
        }
    }

    /// Panels that the last strip of a few sees, and the first of those strips that sees any of a panel's keys.
    fn added(&self, last: Strip) -> impl Iterator<Item = (usize, usize)> {
        let first = last.at - last.slot;
        (0..self.scores(last).panels()).map(move |panel| {
            let sees = |&slot: &usize| self.seen(first + slot).last > panel * SIDE;
            (panel, (0..last.slot).find(sees).unwrap_or(last.slot))
        })
    }

    /// What a few strips add to gradients of values and keys.
    ///
    /// # Safety
    /// As for [`run`](Block::run).
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn add_keys(&self, last: Strip, beside: &mut Interleaved<ScoreGrads<'_, TERMS>>) {
        let h = &self.heads[last.head];
        let rows = self.rows(last.at - last.slot).start..self.rows(last.at).end;
        let step = TileUnit::<TERMS>::PANEL_TILES;
        let factors = [(h.g, self.p.value_depth), (h.q, self.p.depth)];
        for ((x, width), (right, sums)) in factors.into_iter().zip(self.columns.into_iter().zip(self.dk)) {
            for (strip, part) in pieces(width, SIDE).enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    let left = self.transposed;
                    self.amx.pack_a(x.offset(rows.start, part.start).transposed(), (part.len(), rows.len()), left);
                    for (panel, from) in self.added(last) {
                        let right = right.add(((last.half * PANELS + panel) * STRIPS + from) * step);
                        let (sums, steps) = (sums.add((strip * PANELS + panel) * 4), last.slot + 1 - from);
                        self.amx.multiply((left.add(from * step), right), sums, steps, true, || beside.tick());
                    }
                }
            }
        }
    }
}

/// Sums in columns, scaled and rounded into rows of the output.
///
/// # Safety
/// These are rows of the output, which no other thread accesses; the CPU supports the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn columns_out<T: Split<TERMS>, const TERMS: usize>(
    sums: *const Tile,
    out: Matrix<*mut T>,
    (rows, columns): (usize, usize),
    scale: f32,
) {
    for (i, j) in pieces(rows, 16).flat_map(|i| pieces(columns, 16).map(move |j| (i.clone(), j))) {
        let panel = (j.start / SIDE * PANELS + i.start / SIDE) * 4;
        let tile = panel + j.start / 16 % 2 * 2 + i.start / 16 % 2;
        let mask = u32::from(u16::MAX >> (16 - j.len()));
        // SAFETY: the caller's promise.
        unsafe {
            let lines = read_transposed(sums.add(tile).cast(), size_of::<__m512i>() as isize);
            for (at, line) in i.zip(lines) {
                prefetch(out.offset(at + AHEAD, j.start).at, j.len());
                let x = _mm512_mul_ps(_mm512_castsi512_ps(line), _mm512_set1_ps(scale));
                T::store_f32(out.offset(at, j.start).at, mask, [x, _mm512_setzero_ps()]);
            }
        }
    }
}
