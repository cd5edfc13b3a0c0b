//! Attention forward by AMX: outputs and logsumexps.

use std::{arch::x86_64::*, ops::Range};

use numcore::Result;

use super::{
    super::{forward::ForwardHead, *},
    KEY_PANELS, PANEL, Scores, acc_row, exp2_flushed, store_rows, tiles, tiles_len,
};
use crate::{
    fused::softmax::finite,
    gemm::{BackgroundTask, Interleaved, SplitBf16, Tile, TileUnit, split_row},
    math::Math,
};

/// Computes these queries against all keys they see, a micro-panel of queries and a block of keys at a time.
///
/// Outputs that are not finite are recomputed by vectors, since an element that is not finite has a term that is NaN.
pub(in super::super) fn queries<T: SplitBf16<TERMS>, const TERMS: usize>(
    call: &FusedCall<'_>,
    p: &AttentionProblem,
    h: &ForwardHead<T>,
    rows: Range<usize>,
    lse: &mut [f32],
) -> Result<()> {
    let Some(amx) = TileUnit::<TERMS>::new(call.engine().simd) else { return forward::queries(call, p, h, rows, lse) };
    // SAFETY: a CPU that has tiles has the instructions.
    let finite = unsafe { forward_panels(&amx, call, p, h, rows.clone(), lse)? };
    if TERMS == 1 || finite { Ok(()) } else { forward::queries(call, p, h, rows, lse) }
}

/// Computes outputs like [`queries`], without the recomputation. Returns whether all outputs are finite.
///
/// # Safety
/// The CPU has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn forward_panels<T: SplitBf16<TERMS>, const TERMS: usize>(
    amx: &TileUnit<TERMS>,
    call: &FusedCall<'_>,
    p: &AttentionProblem,
    h: &ForwardHead<T>,
    rows: Range<usize>,
    lse: &mut [f32],
) -> Result<bool> {
    let query_panels = rows.len().div_ceil(PANEL);
    let [depth_panels, value_panels] = [p.depth, p.value_depth].map(|n| n.div_ceil(PANEL));
    let operands = [KEY_PANELS * depth_panels, value_panels * KEY_PANELS, depth_panels, 2 * KEY_PANELS]
        .map(|k_tiles| tiles_len(k_tiles * TileUnit::<TERMS>::PANEL_TILES));
    let ([a, b, c, d], [e, f]) = (operands, [2 * KEY_PANELS * 4, query_panels * value_panels * 4].map(tiles_len));
    let mut scratch = Scratch::<f32, _>::new(call.cpu, [a, b, c, d, e, f, rows.len(), rows.len()])?;
    let [k, v, q, weighted, s, o, top, sum] = scratch.buffers();
    o.fill(0.0);
    let [k, v, q, weighted, s, o] = [k, v, q, weighted, s, o].map(tiles);
    let [top, sum] = [top, sum].map(|x| &mut x[..rows.len()]);
    top.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    let scale = (p.scale * std::f64::consts::LOG2_E) as f32;
    for keys in chunks(p.visible(&rows), KEYS) {
        let k_tiles = keys.len().div_ceil(PANEL);
        // SAFETY: the operands have these keys; `k` and `v` hold the tiles of a block.
        unsafe {
            amx.pack_b(h.k.offset(keys.start, 0).transposed(), (p.depth, keys.len()), k);
            amx.pack_b(h.v.offset(keys.start, 0), (keys.len(), p.value_depth), v);
        }
        let queries_of = |i: usize| rows.start + i * PANEL..rows.end.min(rows.start + (i + 1) * PANEL);
        let scores = |i: usize| {
            let seen = p.seen_by(&queries_of(i), &keys);
            Scores { tiles: s.wrapping_add(i % 2 * KEY_PANELS * 4), scale, seen }
        };
        let weighted = |i: usize| weighted.wrapping_add(i % 2 * KEY_PANELS * TileUnit::<TERMS>::PANEL_TILES);
        let acc = |i: usize| o.wrapping_add(i * value_panels * 4);
        let first = (0..query_panels).find(|&i| p.seen(queries_of(i).end - 1, &keys) > 0).unwrap_or(query_panels);
        // Software pipelining: while the scores of one micro-panel become weights, AMX computes the scores of the next
        // and the outputs of the one before.
        for turn in first..query_panels + 2 {
            let at = |behind: usize| turn.checked_sub(behind).filter(|i| (first..query_panels).contains(i));
            let [ahead, here, behind] = [0, 1, 2].map(at);
            let slots = ahead.map_or(0, |i| scores(i).panels() * depth_panels)
                + behind.map_or(0, |i| scores(i).panels() * value_panels);
            let task = here.map(|i| {
                let at = queries_of(i).start - rows.start..queries_of(i).end - rows.start;
                Weights::<TERMS>::new(
                    scores(i),
                    weighted(i),
                    (acc(i), value_panels),
                    (&mut top[at.clone()], &mut sum[at]),
                )
            });
            let mut background = Interleaved::new(task, slots * TileUnit::<TERMS>::SLOTS);
            // SAFETY: the operand has these queries; the tiles are this task's scratch, and the CPU supports AMX.
            unsafe {
                if let Some(i) = ahead {
                    let (scores, step) = (scores(i), queries_of(i));
                    amx.pack_a(h.q.offset(step.start, 0), (step.len(), p.depth), q);
                    for panel in 0..scores.panels() {
                        let (k, to) = (
                            k.add(panel * depth_panels * TileUnit::<TERMS>::PANEL_TILES),
                            scores.tiles.cast_mut().add(panel * 4),
                        );
                        amx.multiply((q, k), to, depth_panels, false, || background.tick());
                    }
                }
                if let Some(i) = behind {
                    for panel in 0..value_panels {
                        let (v, to) = (v.add(panel * k_tiles * TileUnit::<TERMS>::PANEL_TILES), acc(i).add(panel * 4));
                        amx.multiply((weighted(i), v), to, scores(i).panels(), true, || background.tick());
                    }
                }
                background.finish();
            }
        }
    }
    // SAFETY: the CPU supports the instructions.
    let mut all = unsafe { finish_lse(top, sum, lse) };
    for (query_panel, step) in chunks_of(0..rows.len(), PANEL).enumerate() {
        let out = h.o.offset(rows.start + step.start, 0);
        // SAFETY: these queries' rows of the output, which are this task's alone; the CPU supports the instructions.
        all &= unsafe { store_rows(o.add(query_panel * value_panels * 4), out, p.value_depth, &sum[step]) };
    }
    Ok(all)
}

/// Stores the logsumexps, inverts the sums of weights, and returns whether all logsumexps are finite.
///
/// # Safety
/// The CPU has the instructions. (Without them each fused multiply-add of a logarithm is a library call.)
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn finish_lse(top: &[f32], sum: &mut [f32], lse: &mut [f32]) -> bool {
    let mut all = true;
    for ((&top, sum), lse) in top.iter().zip(sum).zip(lse) {
        *lse = finite(top) * std::f32::consts::LN_2 + Math::log(*sum);
        all &= lse.is_finite();
        *sum = if *sum == 0.0 { 0.0 } else { 1.0 / *sum };
    }
    all
}

/// The task that turns scores into weights relative to the largest score so far, in tiles of an A operand, and rescales
/// the outputs so far. For each query it first finds the largest score, then computes the weights one micro-panel of
/// keys at a time.
struct Weights<'a, const TERMS: usize> {
    scores: Scores,
    to: *mut Tile,
    /// Accumulators of the outputs, and how many micro-panels they have.
    acc: (*mut Tile, usize),
    top: &'a mut [f32],
    sum: &'a mut [f32],
    row: usize,
    /// Steps of the row that are finished.
    done: usize,
    row_sum: [__m512; 2],
}

impl<'a, const TERMS: usize> Weights<'a, TERMS> {
    fn new(scores: Scores, to: *mut Tile, acc: (*mut Tile, usize), (top, sum): (&'a mut [f32], &'a mut [f32])) -> Self {
        // SAFETY: all bits zero is a valid vector.
        let row_sum = unsafe { std::mem::zeroed() };
        Weights { scores, to, acc, top, sum, row: 0, done: 0, row_sum }
    }

    /// # Safety
    /// As for [`BackgroundTask::advance`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn rescale(&mut self) {
        let (i, (acc, value_panels)) = (self.row, self.acc);
        let mut most = _mm512_set1_ps(f32::NEG_INFINITY);
        for panel in 0..self.scores.panels() {
            for half in 0..2 {
                // With one NaN operand, `max` returns the second operand. SAFETY: this micro-panel is among those that
                // the query's tiles hold.
                most = _mm512_max_ps(unsafe { self.scores.get(i, panel, half) }, most);
            }
        }
        let before = self.top[i];
        self.top[i] = before.max(_mm512_reduce_max_ps(most));
        if before != self.top[i] {
            let factor = Math::exp2_flushed(before - finite(self.top[i]));
            for (panel, half) in (0..value_panels).flat_map(|panel| [(panel, 0), (panel, 1)]) {
                // SAFETY: these accumulators are this task's.
                unsafe {
                    let at = acc_row(acc.add(panel * 4), i, half);
                    _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factor)));
                }
            }
            self.sum[i] *= factor;
        }
        self.row_sum = [_mm512_setzero_ps(); 2];
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
            // SAFETY: a step remains; the caller guarantees the instructions.
            unsafe { self.rescale() };
            self.done = 1;
            return;
        }
        let panel = self.done - 1;
        let base = _mm512_set1_ps(finite(self.top[i]));
        // SAFETY: there are tiles for every micro-panel that is seen; the caller guarantees the instructions.
        unsafe {
            let [low, high] = [self.scores.get(i, panel, 0), self.scores.get(i, panel, 1)];
            let x = [exp2_flushed(_mm512_sub_ps(low, base)), exp2_flushed(_mm512_sub_ps(high, base))];
            self.row_sum = [_mm512_add_ps(self.row_sum[0], x[0]), _mm512_add_ps(self.row_sum[1], x[1])];
            let to = self.to.add(panel * TileUnit::<TERMS>::PANEL_TILES + i / 16).cast::<__m512i>().add(i % 16);
            for (term, x) in split_row::<TERMS>(x).into_iter().enumerate() {
                *to.add(term * PANEL) = x;
            }
        }
        self.done += 1;
        if self.done > self.scores.panels() {
            self.sum[i] += _mm512_reduce_add_ps(_mm512_add_ps(self.row_sum[0], self.row_sum[1]));
            (self.row, self.done) = (i + 1, 0);
        }
    }
}
