//! Gradients of scores, of a strip of queries and a block of keys.

use std::arch::x86_64::*;

use super::{SIDE, Scores, backward::STRIPS, exp2_flushed, line};
use crate::matmul::{Tile, Tiles, Work, pairs, rows_of};

/// Scores and gradients of weights become weights and gradients of scores before they are scaled: both in the right operand's tiles, of two
/// queries side by side, the gradients in the left one's too. They are 0 where a query sees no key, and where there is no query.
pub(super) struct ScoreGrads<'a, const P: usize> {
    pub scores: Scores,
    pub grads: *mut Tile,
    pub right: [*mut Tile; 2],
    pub left: *mut Tile,
    pub lse: &'a [f32],
    pub dots: &'a [f32],
    /// Halves of panels of pairs of queries.
    pub done: usize,
    /// The gradients of a panel's first half.
    pub first: [__m512i; P],
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
        SIDE * self.scores.panels() - self.done
    }

    /// # Safety
    /// As for [`Work::advance`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn advance(&mut self) {
        let (half, panel) = (self.done % 2, self.done / 2 % self.scores.panels());
        let pair = self.done / 2 / self.scores.panels();
        self.done += 1;
        // SAFETY: the caller's promise; there are tiles for a panel that is seen.
        unsafe {
            let queries = Tiles::<P>::pair(pair);
            let [low, high] = queries.map(|i| self.get(i, panel, half));
            let (weights, grads) = (pairs::<P>([low[0], high[0]]), pairs::<P>([low[1], high[1]]));
            let at = panel * STRIPS * Tiles::<P>::STEP + half;
            for (pieces, to) in [(weights, self.right[0].add(at)), (grads, self.right[1].add(at))] {
                for (piece, x) in pieces.into_iter().enumerate() {
                    *to.add(2 * piece).cast::<__m512i>().add(pair) = x;
                }
            }
            if half == 0 {
                self.first = grads;
                return;
            }
            let to = self.left.add(panel * Tiles::<P>::STEP).cast::<__m512i>();
            for (piece, (&first, second)) in self.first.iter().zip(grads).enumerate() {
                for (row, line) in queries.into_iter().zip(rows_of::<P>([first, second])) {
                    *to.add(piece * SIDE + row) = line;
                }
            }
        }
    }
}
