//! Gradients, in the same blocks. Those of keys and values are made in columns, `dkᵀ = qᵀ·dS` and `dvᵀ = gᵀ·P`: so weights go into a right
//! operand's tiles, where two queries lie side by side, and not into turned ones.

use std::{arch::x86_64::*, ops::Range};

use numcore::Result;

use super::{
    super::{
        backward::{Head, QUERIES, dots_of},
        *,
    },
    PANELS, SIDE, Scores,
    beside::{Beside, Work},
    exp2_flushed, line, room, rows_out, tiles,
};
use crate::{
    matmul::{Pieces, Tile, Tiles, split},
    pointwise::turn_square,
};

/// Strips of queries in a block.
const STRIPS: usize = QUERIES / SIDE;

/// Tiles of a block of queries: upstream gradients and queries as columns, weights and gradients of scores.
struct Block {
    turned: [*mut Tile; 2],
    right: [*mut Tile; 2],
}

/// One task: these keys, and all heads that share them.
pub(in super::super) fn keys<T: Pieces<P>, const P: usize>(
    call: &Call<'_>,
    p: &Problem,
    heads: &[Head<'_, T>],
    mine: Range<usize>,
) -> Result<()> {
    let Some(amx) = Tiles::<P>::of(call.engine().simd) else { return Ok(()) };
    let [deep, wide] = [p.depth, p.value_depth].map(|n| n.div_ceil(SIDE));
    let strips = p.queries.div_ceil(SIDE);
    let operands = [
        PANELS * deep,
        PANELS * wide,
        deep * PANELS,
        deep,
        wide,
        2 * PANELS,
        deep * STRIPS,
        wide * STRIPS,
        PANELS * STRIPS,
        PANELS * STRIPS,
    ];
    let blocks = [2 * PANELS, 2 * PANELS, deep * PANELS, wide * PANELS, p.group * strips * deep];
    let others = [p.group * p.queries, aside::<T>(QUERIES * p.value_depth), aside::<T>(QUERIES * p.value_depth)];
    let operands = operands.into_iter().map(|steps| room(steps * Tiles::<P>::STEP));
    let mut sizes = operands.chain(blocks.map(|n| room(n * 4))).chain(others);
    let mut scratch = Scratch::<f32, 18>::new(call.cpu, std::array::from_fn(|_| sizes.next().unwrap_or(0)))?;
    let [kt, vt, k, q, g, ds_left, qt, gt, weights, ds_right, s, ds, dk, dv, dq, dots, wide_g, wide_o] =
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
        let [kt, vt, k] = [&mut *kt, &mut *vt, &mut *k].map(tiles);
        // SAFETY: these keys of the operands; there is room for a block.
        unsafe {
            let [key, value] = [any.k, any.v].map(|m| m.part(keys.start, 0));
            amx.right(key.turned(), (p.depth, n), kt);
            amx.right(value.turned(), (p.value_depth, n), vt);
            amx.right(key, (n, p.depth), k);
        }
        for (i, (h, dots)) in heads.iter().zip(dots.chunks(p.queries.max(1))).enumerate() {
            for rows in pieces(p.queries, QUERIES).filter(|rows| p.seen(rows.end - 1, &keys) > 0) {
                let block = Block {
                    turned: [&mut *gt, &mut *qt].map(tiles),
                    right: [&mut *weights, &mut *ds_right].map(tiles),
                };
                // SAFETY: these queries of the operands, and tiles of this task's.
                unsafe {
                    let sources = [(h.g, p.value_depth), (h.q, p.depth)];
                    for ((x, width), to) in sources.into_iter().zip(block.turned) {
                        for (strip, part) in pieces(width, SIDE).enumerate() {
                            let x = x.part(rows.start, part.start).turned();
                            amx.left(x, (part.len(), rows.len()), to.add(strip * STRIPS * Tiles::<P>::STEP));
                        }
                    }
                    let [s, ds, ds_left, q, g] = [&mut *s, &mut *ds, &mut *ds_left, &mut *q, &mut *g].map(tiles);
                    let strip = |t: usize| rows.start + t * SIDE..rows.end.min(rows.start + (t + 1) * SIDE);
                    let count = rows.len().div_ceil(SIDE);
                    let scale = (p.scale * std::f64::consts::LOG2_E) as f32;
                    let scores = |t: usize| {
                        let seen = Seen { first: p.seen(strip(t).start, &keys), last: p.seen(strip(t).end - 1, &keys) };
                        Scores { tiles: s.add(t % 2 * PANELS * 4), scale, seen }
                    };
                    let ds = |t: usize| ds.add(t % 2 * PANELS * 4);
                    let ds_left = |t: usize| ds_left.add(t % 2 * PANELS * Tiles::<P>::STEP);
                    let first = (0..count).find(|&t| scores(t).panels() > 0).unwrap_or(count);
                    // While a strip's scores become gradients, those of the strip after it are added up, and what the one before gives to its
                    // queries.
                    for turn in first..count + 2 {
                        let at = |behind: usize| turn.checked_sub(behind).filter(|t| (first..count).contains(t));
                        let [ahead, here, behind] = [0, 1, 2].map(at);
                        let steps = ahead.map_or(0, |t| scores(t).panels() * (deep + wide))
                            + behind.map_or(0, |t| scores(t).panels() * deep);
                        let work = here.map(|t| ScoreGrads::<P> {
                            scores: scores(t),
                            grads: ds(t),
                            right: block.right.map(|x| x.add(t * Tiles::<P>::STEP)),
                            left: ds_left(t),
                            lse: &h.lse[strip(t)],
                            dots: &dots[strip(t)],
                            done: 0,
                        });
                        let mut beside = Beside::new(work, steps * Tiles::<P>::PARTS);
                        if let Some(t) = ahead {
                            let (scores, step) = (scores(t), strip(t));
                            let s = scores.tiles.cast_mut();
                            for (x, width, left, right, sums) in
                                [(h.q, p.depth, q, kt, s), (h.g, p.value_depth, g, vt, ds(t))]
                            {
                                let steps = width.div_ceil(SIDE);
                                amx.left(x.part(step.start, 0), (step.len(), width), left);
                                for panel in 0..scores.panels() {
                                    let right = right.add(panel * steps * Tiles::<P>::STEP);
                                    let sums = sums.add(panel * 4);
                                    amx.multiply_beside((left, right), sums, steps, false, || beside.go_on());
                                }
                            }
                        }
                        if let Some(t) = behind {
                            let dq = dq.add((i * strips + strip(t).start / SIDE) * deep * 4);
                            for panel in 0..deep {
                                let k = k.add(panel * n.div_ceil(SIDE) * Tiles::<P>::STEP);
                                let (sums, steps) = (dq.add(panel * 4), scores(t).panels());
                                amx.multiply_beside((ds_left(t), k), sums, steps, true, || beside.go_on());
                            }
                        }
                        beside.finish();
                    }
                    let sums = [(tiles(dv), wide), (tiles(dk), deep)];
                    add_keys(&amx, p, (&rows, &keys), &block, sums);
                }
            }
        }
        for (sums, out, width, scale) in
            [(&mut *dk, any.dk, p.depth, p.scale as f32), (&mut *dv, any.dv, p.value_depth, 1.0)]
        {
            // SAFETY: these keys' gradients, which are this task's alone; the processor has the instructions.
            unsafe { columns_out(tiles(sums), out.part(keys.start, 0), (n, width), scale) };
        }
    }
    for (i, h) in heads.iter().enumerate() {
        for (strip, step) in pieces(p.queries, SIDE).enumerate() {
            let (sums, scale) = (dq.wrapping_add((i * strips + strip) * deep * 4), p.scale as f32);
            // SAFETY: these queries' gradients, which are this task's alone; the processor has the instructions.
            let _ = unsafe {
                match h.rounded {
                    Some(out) => rows_out(sums, out.part(step.start, 0), p.depth, &[scale; SIDE][..step.len()]),
                    None => rows_out(sums, h.dq.part(step.start, 0), p.depth, &[scale; SIDE][..step.len()]),
                }
            };
        }
    }
    Ok(())
}

/// What a block of queries adds to gradients of values and keys.
///
/// # Safety
/// The tiles are this task's, those of strips that see any of a panel's keys are filled.
unsafe fn add_keys<const P: usize>(
    amx: &Tiles<P>,
    p: &Problem,
    (rows, keys): (&Range<usize>, &Range<usize>),
    block: &Block,
    sums: [(*mut Tile, usize); 2],
) {
    for panel in 0..p.seen(rows.end - 1, keys).div_ceil(SIDE) {
        let sees = |step: Range<usize>| p.seen(step.end - 1, keys) > panel * SIDE;
        let Some(first) = parts(rows.clone(), SIDE).position(sees) else { continue };
        let steps = rows.len().div_ceil(SIDE) - first;
        for ((sums, strips), (left, right)) in sums.into_iter().zip(block.turned.into_iter().zip(block.right)) {
            for strip in 0..strips {
                // SAFETY: the caller's promise.
                unsafe {
                    let left = left.add((strip * STRIPS + first) * Tiles::<P>::STEP);
                    let right = right.add((panel * STRIPS + first) * Tiles::<P>::STEP);
                    amx.multiply(left, right, sums.add((strip * PANELS + panel) * 4), steps, true);
                }
            }
        }
    }
}

/// Scores and gradients of weights become weights and gradients of scores before they are scaled: both in the right operand's tiles, of two
/// queries side by side, the gradients in the left one's too. They are 0 where a query sees no key, and where there is no query.
struct ScoreGrads<'a, const P: usize> {
    scores: Scores,
    grads: *mut Tile,
    right: [*mut Tile; 2],
    left: *mut Tile,
    lse: &'a [f32],
    dots: &'a [f32],
    /// Panels of pairs of queries.
    done: usize,
}

impl<const P: usize> ScoreGrads<'_, P> {
    /// Half of a panel's weights of a query and gradients of its scores.
    ///
    /// # Safety
    /// As for [`Work::advance`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn get(&self, i: usize, panel: usize, half: usize) -> [__m512; 2] {
        let known = self.lse.get(i).zip(self.dots.get(i));
        // A query that saw nothing has no finite logsumexp, and no weight.
        let Some((&lse, &dot)) = known.filter(|(lse, _)| **lse != f32::NEG_INFINITY) else {
            return [_mm512_setzero_ps(); 2];
        };
        // SAFETY: the caller's promise.
        let (s, g) =
            unsafe { (self.scores.get(i, panel, half), _mm512_load_ps(line(self.grads.add(panel * 4), i, half))) };
        let p = exp2_flushed(_mm512_sub_ps(s, _mm512_set1_ps(lse * std::f32::consts::LOG2_E)));
        // What is hidden is 0, whatever its gradient.
        let there = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(p, _mm512_setzero_ps());
        [p, _mm512_maskz_mul_ps(there, p, _mm512_sub_ps(g, _mm512_set1_ps(dot)))]
    }
}

impl<const P: usize> Work for ScoreGrads<'_, P> {
    fn left(&self) -> usize {
        SIDE / 2 * self.scores.panels() - self.done
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn advance(&mut self) {
        const PAIRS: [u16; 32] = {
            let mut order = [0; 32];
            let mut i = 0;
            while i < 32 {
                order[i] = (i / 2 + i % 2 * 16) as u16;
                i += 1;
            }
            order
        };
        let (pair, panel) = (self.done / self.scores.panels(), self.done % self.scores.panels());
        self.done += 1;
        // SAFETY: the caller's promise; there are tiles for a panel that is seen.
        unsafe {
            let order = _mm512_loadu_si512(PAIRS.as_ptr().cast());
            let halves = [0, 1].map(|half| {
                let [low, high] = [0, 1].map(|side| self.get(2 * pair + side, panel, half));
                let pieces = [0, 1].map(|which| split::<P>([low[which], high[which]]));
                for (pieces, to) in pieces.iter().zip(self.right) {
                    let to = to.add(panel * STRIPS * Tiles::<P>::STEP + half).cast::<__m512i>().add(pair);
                    for (piece, &x) in pieces.iter().enumerate() {
                        *to.add(piece * SIDE) = _mm512_permutexvar_epi16(order, x);
                    }
                }
                pieces[1]
            });
            for side in 0..2 {
                let i = 2 * pair + side;
                let to = self.left.add(panel * Tiles::<P>::STEP + i / 16).cast::<__m512i>().add(i % 16);
                for piece in 0..P {
                    let [first, second] = [halves[0][piece], halves[1][piece]];
                    *to.add(piece * SIDE) = match side {
                        0 => _mm512_shuffle_i64x2::<0x44>(first, second),
                        _ => _mm512_shuffle_i64x2::<0xee>(first, second),
                    };
                }
            }
        }
    }
}

/// Sums in columns, scaled and rounded into rows of the output.
///
/// # Safety
/// These are rows of the output, which nothing else sees; the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn columns_out<T: Pieces<P>, const P: usize>(
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
            let lines = turn_square(sums.add(tile).cast::<[__m512i; 16]>().read());
            for (at, line) in i.zip(lines) {
                let x = _mm512_mul_ps(_mm512_castsi512_ps(line), _mm512_set1_ps(scale));
                T::write(out.part(at, j.start).at, mask, [x, _mm512_setzero_ps()]);
            }
        }
    }
}
