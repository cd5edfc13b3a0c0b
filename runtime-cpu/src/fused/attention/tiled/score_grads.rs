//! Gradients of scores, of a strip of queries and a block of keys.

use std::arch::x86_64::*;

use super::{SIDE, Scores, backward::STRIPS, exp2_flushed, line};
use crate::gemm::{BackgroundTask, Tile, TileUnit, split_pairs, unpair_rows};

/// Scores and gradients of weights become weights and gradients of scores before they are scaled: both in the right operand's tiles, of two
/// queries side by side, the gradients in the left one's too. They are 0 where a query sees no key, and where there is no query.
pub(super) struct ScoreGrads<'a, const TERMS: usize> {
    pub scores: Scores,
    pub grads: *mut Tile,
    pub right: [*mut Tile; 2],
    pub left: *mut Tile,
    pub lse: &'a [f32],
    pub dots: &'a [f32],
    /// Halves of panels of pairs of queries.
    pub done: usize,
    /// The gradients of a panel's first half.
    pub first: [__m512i; TERMS],
}

impl<const TERMS: usize> ScoreGrads<'_, TERMS> {
    /// Half of a panel's weights of a query and gradients of its scores.
    ///
    /// # Safety
    /// As for [`BackgroundTask::advance`].
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

impl<const TERMS: usize> BackgroundTask for ScoreGrads<'_, TERMS> {
    fn remaining(&self) -> usize {
        SIDE * self.scores.panels() - self.done
    }

    /// # Safety
    /// As for [`BackgroundTask::advance`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn advance(&mut self) {
        let (half, panel) = (self.done % 2, self.done / 2 % self.scores.panels());
        let pair = self.done / 2 / self.scores.panels();
        self.done += 1;
        // SAFETY: the caller's promise; there are tiles for a panel that is seen.
        unsafe {
            let queries = TileUnit::<TERMS>::k_pair(pair);
            let [low, high] = queries.map(|i| self.get(i, panel, half));
            let (weights, grads) = (split_pairs::<TERMS>([low[0], high[0]]), split_pairs::<TERMS>([low[1], high[1]]));
            let at = panel * STRIPS * TileUnit::<TERMS>::PANEL_TILES + half;
            for (pieces, to) in [(weights, self.right[0].add(at)), (grads, self.right[1].add(at))] {
                for (piece, x) in pieces.into_iter().enumerate() {
                    *to.add(2 * piece).cast::<__m512i>().add(pair) = x;
                }
            }
            if half == 0 {
                self.first = grads;
                return;
            }
            let to = self.left.add(panel * TileUnit::<TERMS>::PANEL_TILES).cast::<__m512i>();
            for (piece, (&first, second)) in self.first.iter().zip(grads).enumerate() {
                for (row, line) in queries.into_iter().zip(unpair_rows::<TERMS>([first, second])) {
                    *to.add(piece * SIDE + row) = line;
                }
            }
        }
    }
}
