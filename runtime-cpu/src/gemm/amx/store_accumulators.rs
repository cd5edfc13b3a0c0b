//! The end of sums: accumulators are added to partial sums, or stored in the output, between multiplications.

use std::arch::x86_64::__m512;

use super::{
    BackgroundTask, Tile,
    split::{self, SplitBf16, TileElement},
    store_tiles::{self, RowStore},
    tile_loops::TileGemm,
    tile_operand::{TileA, TileB},
};

/// Adds the accumulators of two micro-panels to partial sums, or stores them in the output, or both, row by row.
pub(super) struct StoreAccumulators<'a, T, O, A, B, const TERMS: usize> {
    pub(super) gemm: &'a TileGemm<T, O, A, B, TERMS>,
    /// The destination of complete sums; `None` if they are incomplete.
    pub(super) to: Option<RowStore<O>>,
    /// The first row and column of the tiles in the output.
    pub(super) at: [usize; 2],
    pub(super) acc: *const Tile,
    /// The partial sums of the blocks of `k` before.
    pub(super) partials: Option<*mut Tile>,
    pub(super) row: usize,
    pub(super) rows: usize,
}

impl<T, O, A, B, const TERMS: usize> BackgroundTask for StoreAccumulators<'_, T, O, A, B, TERMS>
where
    T: SplitBf16<TERMS>,
    O: TileElement,
    A: TileA<T, TERMS>,
    B: TileB<T, TERMS>,
{
    fn remaining(&self) -> usize {
        self.rows - self.row
    }

    /// # Safety
    /// As for [`BackgroundTask::advance`]: a row remains, and the CPU supports the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn advance(&mut self) {
        // SAFETY: `TileGemm::a_panel` made this, for valid operands, and an output and accumulators that no other
        // thread accesses.
        unsafe {
            let mut acc = store_tiles::load(self.acc, self.row);
            if let Some(partials) = self.partials {
                acc = store_tiles::add(partials, self.row, acc);
            }
            match (&mut self.to, self.partials) {
                (Some(to), _) if to.not_finite::<TERMS>(acc) != 0 => self.put_recomputed(acc),
                (Some(to), _) => to.put(acc),
                (None, Some(partials)) => store_tiles::store(partials, self.row, acc),
                (None, None) => {}
            }
        }
        self.row += 1;
    }
}

impl<T, O, A, B, const TERMS: usize> StoreAccumulators<'_, T, O, A, B, TERMS>
where
    T: SplitBf16<TERMS>,
    O: TileElement,
    A: TileA<T, TERMS>,
    B: TileB<T, TERMS>,
{
    /// Stores a row some of whose sums are not finite: those are recomputed in `f32`.
    ///
    /// # Safety
    /// As for [`BackgroundTask::advance`]: a row remains, and the CPU supports the instructions.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn put_recomputed(&mut self, acc: [__m512; 2]) {
        let Some(to) = &mut self.to else { return };
        let (TileGemm { a, b, k, .. }, i, j) = (self.gemm, self.at[0] + self.row, self.at[1]);
        // SAFETY: row `i` of `a` and column `j + lane` of `b` are operands' of this GEMM, whose caller guarantees them.
        unsafe {
            let recompute = |lane: usize| split::recompute(|q| a.element(i, q), |q| b.element(q, j + lane), *k);
            to.put_recomputed::<TERMS>(acc, recompute);
        }
    }
}
