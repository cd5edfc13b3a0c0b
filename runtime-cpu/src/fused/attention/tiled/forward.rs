//! Outputs and logsumexps.

use std::{arch::x86_64::*, ops::Range};

use numcore::Result;

use super::{
    super::{forward::Head, *},
    PANELS, SIDE, Scores, exp2_flushed, line, room, rows_out, tiles,
};
use crate::{
    fused::softmax::finite,
    gemm::{BackgroundTask, Interleaved, Split, Tile, TileUnit, split_row},
    math::Math,
};

/// These queries against all keys they see, a strip of queries and a block of keys at a time.
///
/// A number that is not finite has a piece that is NaN: what is not finite then is computed anew without pieces.
pub(in super::super) fn queries<T: Split<TERMS>, const TERMS: usize>(
    call: &Call<'_>,
    p: &Problem,
    h: &Head<T>,
    rows: Range<usize>,
    lse: &mut [f32],
) -> Result<()> {
    let Some(amx) = TileUnit::<TERMS>::new(call.engine().simd) else { return forward::queries(call, p, h, rows, lse) };
    // SAFETY: a CPU that has tiles has the instructions.
    let finite = unsafe { by_tiles(&amx, call, p, h, rows.clone(), lse)? };
    if TERMS == 1 || finite { Ok(()) } else { forward::queries(call, p, h, rows, lse) }
}

/// The same; says whether all is finite.
///
/// # Safety
/// The CPU has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn by_tiles<T: Split<TERMS>, const TERMS: usize>(
    amx: &TileUnit<TERMS>,
    call: &Call<'_>,
    p: &Problem,
    h: &Head<T>,
    rows: Range<usize>,
    lse: &mut [f32],
) -> Result<bool> {
    let strips = rows.len().div_ceil(SIDE);
    let [deep, wide] = [p.depth, p.value_depth].map(|n| n.div_ceil(SIDE));
    let operands =
        [PANELS * deep, wide * PANELS, deep, 2 * PANELS].map(|steps| room(steps * TileUnit::<TERMS>::PANEL_TILES));
    let ([a, b, c, d], [e, f]) = (operands, [2 * PANELS * 4, strips * wide * 4].map(room));
    let mut scratch = Scratch::<f32, _>::new(call.cpu, [a, b, c, d, e, f, rows.len(), rows.len()])?;
    let [k, v, q, weighted, s, o, top, sum] = scratch.parts();
    o.fill(0.0);
    let [k, v, q, weighted, s, o] = [k, v, q, weighted, s, o].map(tiles);
    let [top, sum] = [top, sum].map(|x| &mut x[..rows.len()]);
    top.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    let scale = (p.scale * std::f64::consts::LOG2_E) as f32;
    for keys in pieces(p.visible(&rows), KEYS) {
        let steps = keys.len().div_ceil(SIDE);
        // SAFETY: these keys of the operands; there is room for a block.
        unsafe {
            amx.pack_b(h.k.offset(keys.start, 0).transposed(), (p.depth, keys.len()), k);
            amx.pack_b(h.v.offset(keys.start, 0), (keys.len(), p.value_depth), v);
        }
        let strip = |i: usize| rows.start + i * SIDE..rows.end.min(rows.start + (i + 1) * SIDE);
        let scores = |i: usize| {
            let seen = p.seen_by(&strip(i), &keys);
            Scores { tiles: s.wrapping_add(i % 2 * PANELS * 4), scale, seen }
        };
        let weighted = |i: usize| weighted.wrapping_add(i % 2 * PANELS * TileUnit::<TERMS>::PANEL_TILES);
        let sums = |i: usize| o.wrapping_add(i * wide * 4);
        let first = (0..strips).find(|&i| p.seen(strip(i).end - 1, &keys) > 0).unwrap_or(strips);
        // While a strip's scores become weights, those of the strip after it are added up, and the outputs of the strip before it.
        for turn in first..strips + 2 {
            let at = |behind: usize| turn.checked_sub(behind).filter(|i| (first..strips).contains(i));
            let [ahead, here, behind] = [0, 1, 2].map(at);
            let parts =
                ahead.map_or(0, |i| scores(i).panels() * deep) + behind.map_or(0, |i| scores(i).panels() * wide);
            let work = here.map(|i| {
                let at = strip(i).start - rows.start..strip(i).end - rows.start;
                Weights::<TERMS>::new(scores(i), weighted(i), (sums(i), wide), (&mut top[at.clone()], &mut sum[at]))
            });
            let mut beside = Interleaved::new(work, parts * TileUnit::<TERMS>::SLOTS);
            // SAFETY: these queries of the operand; the tiles are this task's, and the CPU supports the instructions.
            unsafe {
                if let Some(i) = ahead {
                    let (scores, step) = (scores(i), strip(i));
                    amx.pack_a(h.q.offset(step.start, 0), (step.len(), p.depth), q);
                    for panel in 0..scores.panels() {
                        let (k, to) = (
                            k.add(panel * deep * TileUnit::<TERMS>::PANEL_TILES),
                            scores.tiles.cast_mut().add(panel * 4),
                        );
                        amx.multiply((q, k), to, deep, false, || beside.tick());
                    }
                }
                if let Some(i) = behind {
                    for panel in 0..wide {
                        let (v, to) = (v.add(panel * steps * TileUnit::<TERMS>::PANEL_TILES), sums(i).add(panel * 4));
                        amx.multiply((weighted(i), v), to, scores(i).panels(), true, || beside.tick());
                    }
                }
                beside.finish();
            }
        }
    }
    // SAFETY: the CPU supports the instructions.
    let mut all = unsafe { settle(top, sum, lse) };
    for (strip, step) in parts(0..rows.len(), SIDE).enumerate() {
        let out = h.o.offset(rows.start + step.start, 0);
        // SAFETY: these queries' rows of the output, which are this task's alone; the CPU supports the instructions.
        all &= unsafe { rows_out(o.add(strip * wide * 4), out, p.value_depth, &sum[step]) };
    }
    Ok(all)
}

/// Logsumexps of the largest scores and the sums, which become their inverses; says whether all are finite.
///
/// # Safety
/// The CPU has the instructions. (Without them each fused step of a logarithm is the call of a library.)
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn settle(top: &[f32], sum: &mut [f32], lse: &mut [f32]) -> bool {
    let mut all = true;
    for ((&top, sum), lse) in top.iter().zip(sum).zip(lse) {
        *lse = finite(top) * std::f32::consts::LN_2 + Math::log(*sum);
        all &= lse.is_finite();
        *sum = if *sum == 0.0 { 0.0 } else { 1.0 / *sum };
    }
    all
}

/// Turns scores into weights relative to the largest score so far, in the left operand's tiles, and rescales what was gathered before: of
/// each query first the largest score, then a panel's weights after the other's.
struct Weights<'a, const TERMS: usize> {
    scores: Scores,
    to: *mut Tile,
    /// Sums of so many panels.
    sums: (*mut Tile, usize),
    top: &'a mut [f32],
    sum: &'a mut [f32],
    row: usize,
    /// Pieces of the row that are done.
    done: usize,
    gathered: [__m512; 2],
}

impl<'a, const TERMS: usize> Weights<'a, TERMS> {
    fn new(
        scores: Scores,
        to: *mut Tile,
        sums: (*mut Tile, usize),
        (top, sum): (&'a mut [f32], &'a mut [f32]),
    ) -> Self {
        // SAFETY: zeros are such registers.
        let gathered = unsafe { std::mem::zeroed() };
        Weights { scores, to, sums, top, sum, row: 0, done: 0, gathered }
    }

    /// # Safety
    /// As for [`BackgroundTask::advance`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn rescale(&mut self) {
        let (i, (sums, wide)) = (self.row, self.sums);
        let mut most = _mm512_set1_ps(f32::NEG_INFINITY);
        for panel in 0..self.scores.panels() {
            for half in 0..2 {
                // Of NaN and a number the second is given.
                // SAFETY: the caller's promise.
                most = _mm512_max_ps(unsafe { self.scores.get(i, panel, half) }, most);
            }
        }
        let before = self.top[i];
        self.top[i] = before.max(_mm512_reduce_max_ps(most));
        if before != self.top[i] {
            let factor = Math::exp2_flushed(before - finite(self.top[i]));
            for (panel, half) in (0..wide).flat_map(|panel| [(panel, 0), (panel, 1)]) {
                // SAFETY: these sums are this task's.
                unsafe {
                    let at = line(sums.add(panel * 4), i, half);
                    _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factor)));
                }
            }
            self.sum[i] *= factor;
        }
        self.gathered = [_mm512_setzero_ps(); 2];
    }
}

impl<const TERMS: usize> BackgroundTask for Weights<'_, TERMS> {
    fn remaining(&self) -> usize {
        (self.top.len() - self.row) * (1 + self.scores.panels()) - self.done
    }

    /// # Safety
    /// As for [`BackgroundTask::advance`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn advance(&mut self) {
        let i = self.row;
        if self.done == 0 {
            // SAFETY: the caller's promise.
            unsafe { self.rescale() };
            self.done = 1;
            return;
        }
        let panel = self.done - 1;
        let base = _mm512_set1_ps(finite(self.top[i]));
        // SAFETY: the caller's promise; there are tiles for a panel that is seen.
        unsafe {
            let [low, high] = [self.scores.get(i, panel, 0), self.scores.get(i, panel, 1)];
            let x = [exp2_flushed(_mm512_sub_ps(low, base)), exp2_flushed(_mm512_sub_ps(high, base))];
            self.gathered = [_mm512_add_ps(self.gathered[0], x[0]), _mm512_add_ps(self.gathered[1], x[1])];
            let to = self.to.add(panel * TileUnit::<TERMS>::PANEL_TILES + i / 16).cast::<__m512i>().add(i % 16);
            for (piece, x) in split_row::<TERMS>(x).into_iter().enumerate() {
                *to.add(piece * SIDE) = x;
            }
        }
        self.done += 1;
        if self.done > self.scores.panels() {
            self.sum[i] += _mm512_reduce_add_ps(_mm512_add_ps(self.gathered[0], self.gathered[1]));
            (self.row, self.done) = (i + 1, 0);
        }
    }
}
