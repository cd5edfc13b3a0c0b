//! In what order a product is computed on one thread.

use super::{STEP, pack::PAIR};

/// How a product is computed: strips of rows against so many columns, for so many steps, and the same for the next steps and columns.
pub(super) struct Plan {
    /// Rows, steps and columns.
    pub sizes: [usize; 3],
    /// Steps and columns that are packed at once.
    pub deep: usize,
    pub columns: usize,
    /// Whether strips are packed once for all columns.
    pub kept: bool,
}

/// A strip, and which columns and steps it is multiplied with.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub column: usize,
    pub step: usize,
    pub row: usize,
}

impl Plan {
    /// Columns of a block.
    pub(super) fn columns(&self, at: At) -> usize {
        self.columns.min(self.sizes[2] - at.column)
    }

    /// Steps of a block.
    pub(super) fn depth(&self, at: At) -> usize {
        self.deep.min(self.sizes[1] - at.step)
    }

    /// Rows of a strip.
    pub(super) fn rows(&self, at: At) -> usize {
        PAIR.min(self.sizes[0] - at.row)
    }

    /// Tiles of steps of a block at most, and panels.
    pub(super) fn tiles(&self) -> [usize; 2] {
        [self.deep.min(self.sizes[1]).div_ceil(STEP), self.columns / PAIR]
    }

    /// Whether sums wait for later steps.
    pub(super) fn waits(&self) -> bool {
        self.sizes[1] > self.deep
    }

    /// The strip after this one.
    pub(super) fn next(&self, at: At) -> Option<At> {
        let row = at.row + PAIR;
        if row < self.sizes[0] { Some(At { row, ..at }) } else { self.next_block(at) }
    }

    /// The first strip with other columns or steps. (A sum of nothing is still one.)
    fn next_block(&self, at: At) -> Option<At> {
        let [_, k, n] = self.sizes;
        let [step, column] = [at.step + self.deep, at.column + self.columns];
        match (step < k, column < n) {
            (true, _) => Some(At { step, row: 0, ..at }),
            (_, true) => Some(At { column, step: 0, row: 0 }),
            _ => None,
        }
    }
}
