//! Gradients of scores, of a micro-panel of queries and a block of keys.

use std::arch::x86_64::*;

use super::{PANEL, Scores, acc_row, backward::QUERY_PANELS, exp2_flushed};
use crate::gemm::{BackgroundTask, Tile, TileUnit, split_pairs, unpair_rows};

/// The task that turns scores and gradients of weights into weights and unscaled gradients of scores. Both go into
/// tiles of a B operand, which pair two queries, and the gradients into tiles of an A operand, too. They are 0 where a
/// query does not see a key, and where there is no query.
pub(super) struct ScoreGrads<'a, const TERMS: usize> {
    pub scores: Scores,
    pub grads: *mut Tile,
    pub right: [*mut Tile; 2],
    pub left: *mut Tile,
    pub lse: &'a [f32],
    pub dots: &'a [f32],
    /// Finished steps, each of 16 keys of a micro-panel for two queries.
    pub done: usize,
    /// The gradients for the first 16 keys of a micro-panel.
    pub first: [__m512i; TERMS],
}

impl<const TERMS: usize> ScoreGrads<'_, TERMS> {
    /// A query's weights for 16 keys of a micro-panel, and the gradients of its scores.
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
        // SAFETY: the tiles hold every micro-panel that is seen; the caller guarantees the instructions.
        let (s, g) =
            unsafe { (self.scores.get(i, panel, half), _mm512_load_ps(acc_row(self.grads.add(panel * 4), i, half))) };
        let p = exp2_flushed(_mm512_sub_ps(s, _mm512_set1_ps(lse * std::f32::consts::LOG2_E)));
        // A hidden key has weight and gradient 0 for every gradient of its weight.
        let there = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(p, _mm512_setzero_ps());
        [p, _mm512_maskz_mul_ps(there, p, _mm512_sub_ps(g, _mm512_set1_ps(dot)))]
    }
}

impl<const TERMS: usize> BackgroundTask for ScoreGrads<'_, TERMS> {
    fn remaining(&self) -> usize {
        PANEL * self.scores.panels() - self.done
    }

    /// # Safety
    /// As for [`BackgroundTask::advance`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn advance(&mut self) {
        let (half, panel) = (self.done % 2, self.done / 2 % self.scores.panels());
        let pair = self.done / 2 / self.scores.panels();
        self.done += 1;
        // SAFETY: there are tiles for every micro-panel that is seen; the caller guarantees the instructions.
        unsafe {
            let queries = TileUnit::<TERMS>::k_pair(pair);
            let [low, high] = queries.map(|i| self.get(i, panel, half));
            let (weights, grads) = (split_pairs::<TERMS>([low[0], high[0]]), split_pairs::<TERMS>([low[1], high[1]]));
            let at = panel * QUERY_PANELS * TileUnit::<TERMS>::PANEL_TILES + half;
            for (terms, to) in [(weights, self.right[0].add(at)), (grads, self.right[1].add(at))] {
                for (term, x) in terms.into_iter().enumerate() {
                    *to.add(2 * term).cast::<__m512i>().add(pair) = x;
                }
            }
            if half == 0 {
                self.first = grads;
                return;
            }
            let to = self.left.add(panel * TileUnit::<TERMS>::PANEL_TILES).cast::<__m512i>();
            for (term, (&first, second)) in self.first.iter().zip(grads).enumerate() {
                for (row, elements) in queries.into_iter().zip(unpair_rows::<TERMS>([first, second])) {
                    *to.add(term * PANEL + row) = elements;
                }
            }
        }
    }
}
