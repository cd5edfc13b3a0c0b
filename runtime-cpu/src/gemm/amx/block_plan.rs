//! The order of the blocks of a GEMM in tiles, on one thread.

use super::{GemmSize, TILE_K, pack_tiles::PANEL};

/// Block sizes of a GEMM. The loops, from the outermost: blocks of `nc` columns, blocks of depth `kc`, A micro-panels.
pub(super) struct BlockPlan {
    pub size: GemmSize,
    /// The number of rows of B that are packed at once.
    pub kc: usize,
    /// The number of columns of B that are packed at once.
    pub nc: usize,
    /// True if A is packed once for all blocks of columns.
    pub keeps_a: bool,
}

/// An A micro-panel, and the block of B it is multiplied with.
#[derive(Clone, Copy)]
pub(super) struct BlockPosition {
    /// The first column of the block.
    pub column: usize,
    /// The block's first row of B, which is its first column of A.
    pub k: usize,
    /// The first row of the A micro-panel.
    pub row: usize,
}

impl BlockPlan {
    /// The number of columns of the block.
    pub(super) fn nc(&self, at: BlockPosition) -> usize {
        self.nc.min(self.size.n - at.column)
    }

    /// The depth of the block.
    pub(super) fn kc(&self, at: BlockPosition) -> usize {
        self.kc.min(self.size.k - at.k)
    }

    /// The number of rows of the A micro-panel.
    pub(super) fn rows(&self, at: BlockPosition) -> usize {
        PANEL.min(self.size.m - at.row)
    }

    /// The most tiles along the depth of a block, and the number of its B micro-panels.
    pub(super) fn tiles(&self) -> [usize; 2] {
        [self.kc.min(self.size.k).div_ceil(TILE_K), self.nc / PANEL]
    }

    /// Tells whether partial sums wait for later blocks of `k`.
    pub(super) fn has_partials(&self) -> bool {
        self.size.k > self.kc
    }

    /// The A micro-panel after this one.
    pub(super) fn next(&self, at: BlockPosition) -> Option<BlockPosition> {
        let row = at.row + PANEL;
        if row < self.size.m { Some(BlockPosition { row, ..at }) } else { self.next_block(at) }
    }

    /// The first A micro-panel of the next block. (With `k = 0` there is still one block.)
    fn next_block(&self, at: BlockPosition) -> Option<BlockPosition> {
        let GemmSize { k: depth, n, .. } = self.size;
        let [k, column] = [at.k + self.kc, at.column + self.nc];
        match (k < depth, column < n) {
            (true, _) => Some(BlockPosition { k, row: 0, ..at }),
            (_, true) => Some(BlockPosition { column, k: 0, row: 0 }),
            _ => None,
        }
    }
}
