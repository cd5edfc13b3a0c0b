//! Partitions the output of a GEMM into tiles for threads, by a small cost model.

use std::ops::Range;

use super::{
    GRAIN, Gemm,
    gemv::{self, GROUP},
};

/// Rows and columns of tiles are multiples of these: the largest micro-panel of A, and the widest vector.
const ROW_MULTIPLE: usize = 8;
const COLUMN_MULTIPLE: usize = 16;

/// The number of elements of B that a task reads where reading B takes all of its time: some tens of microseconds.
const READ_GRAIN: usize = 1 << 16;

/// The fraction of its last task by which a thread is late, about.
pub(super) const IMBALANCE: f64 = 0.1;

/// The partition of one output matrix into tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Partition {
    /// Rows and columns of a tile.
    rows: usize,
    columns: usize,
    /// Tiles in a row of tiles.
    across: usize,
    tiles: usize,
}

/// The limits of the partitions among which [`Partition::cheapest`] chooses.
pub(super) struct PartitionLimits {
    /// The fewest multiply-adds of a tile.
    pub grain: usize,
    /// The fraction of its last task by which a thread is late.
    pub imbalance: f64,
    /// The numbers of which rows and columns of tiles are multiples.
    pub multiple: [usize; 2],
}

impl Partition {
    /// The partition of a GEMM by vector instructions.
    pub(super) fn new(p: &Gemm, threads: usize) -> Partition {
        if p.m <= gemv::MAX_ROWS && p.b[0] == 1 && p.n > GROUP {
            return Partition::of_columns(p);
        }
        // A single thread never waits, and each column of tiles reads the rows again: 3 % of a GEMM of 1024³. (The bf16
        // path is faster with smaller tiles.)
        let imbalance = if threads > 1 { IMBALANCE } else { 0.0 };
        let limits = PartitionLimits { grain: GRAIN, imbalance, multiple: [ROW_MULTIPLE, COLUMN_MULTIPLE] };
        Partition::cheapest(p, threads, limits, |tile| p.cost(tile))
    }

    /// The partition that takes least time if the largest tile takes `cost([rows, columns])`.
    pub(super) fn cheapest(
        p: &Gemm,
        threads: usize,
        limits: PartitionLimits,
        cost: impl Fn([usize; 2]) -> f64,
    ) -> Partition {
        let batch = p.batch.len().max(1);
        let most = (p.m * p.n * p.k / limits.grain).clamp(1, (4 * threads).div_ceil(batch));
        let cost = |partition: &Partition| {
            let tasks = (batch * partition.tiles) as f64;
            ((tasks / threads as f64).ceil() + limits.imbalance)
                * cost([partition.rows.min(p.m), partition.columns.min(p.n)])
        };
        let new = |down, across| Partition::of_tiles([p.m, p.n], [down, across], limits.multiple);
        let partitions = (1..=most).flat_map(|down| (1..=most / down).map(move |across| new(down, across)));
        partitions.min_by(|x, y| cost(x).total_cmp(&cost(y))).unwrap_or_else(|| new(1, 1))
    }

    /// The partition of a GEMM that takes as long as reading B does: tiles of as many bytes as are worth a hand-over.
    fn of_columns(p: &Gemm) -> Partition {
        let columns = (READ_GRAIN / p.k.max(1)).max(GROUP).next_multiple_of(GROUP).min(p.n.next_multiple_of(GROUP));
        let across = p.n.div_ceil(columns);
        Partition { rows: p.m, columns, across, tiles: across }
    }

    fn of_tiles([m, n]: [usize; 2], [down, across]: [usize; 2], multiple: [usize; 2]) -> Partition {
        let rows = m.div_ceil(down).next_multiple_of(multiple[0]);
        let columns = n.div_ceil(across).next_multiple_of(multiple[1]);
        let across = n.div_ceil(columns);
        Partition { rows, columns, across, tiles: m.div_ceil(rows) * across }
    }

    pub(super) fn tiles(&self) -> usize {
        self.tiles
    }

    /// Rows and columns of tile `i` of an `[m, n]` output.
    pub(super) fn tile(&self, i: usize, m: usize, n: usize) -> (Range<usize>, Range<usize>) {
        let (row, column) = (i / self.across * self.rows, i % self.across * self.columns);
        (row..m.min(row + self.rows), column..n.min(column + self.columns))
    }
}

impl Gemm {
    /// The time of a tile with these rows and columns, relative to others: FMAs of micro-tiles, and the cost of reading
    /// and packing for them.
    fn cost(&self, tile: [usize; 2]) -> f64 {
        let [rows, columns] = tile.map(|n| n as f64);
        // A partial B micro-panel is read as often as a full one, for fewer FMAs.
        let panels = (columns / 48.0).floor() + [0.0, 0.5, 0.75, 1.0][(columns % 48.0 / 16.0).ceil() as usize];
        let fmas = (rows / 8.0).ceil() * panels * 12.0;
        let columns_packed = columns * if self.b[1] == 1 { 0.6 } else { 1.0 };
        // Packing reads from the LLC or memory, at a few bytes a cycle. Rows that are read in place are read again for
        // each column of tiles.
        let rows_read = rows * if self.a[1] == 1 { 0.1 } else { 1.0 };
        (fmas + columns_packed + rows_read) * self.k as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::walk::Walk;

    fn partition(m: usize, k: usize, n: usize, transposed: [bool; 2], threads: usize) -> Partition {
        let strides = |t: bool, row: usize| if t { [1, 1000] } else { [row as isize, 1] };
        let batch = Walk::of([]);
        let (a, b) = (strides(transposed[0], k), strides(transposed[1], n));
        Partition::new(&Gemm { batch, m, k, n, a, b, out: [n as isize, 1] }, threads)
    }

    #[test]
    fn tiles_cover_once() {
        for (m, n) in [(1, 1), (1024, 1024), (512, 50257), (50257, 512), (7, 9), (1, 4096), (4096, 1), (100, 200)] {
            for threads in [1, 2, 3, 16] {
                let partition = partition(m, 512, n, [false; 2], threads);
                let tiles = (0..partition.tiles()).map(|i| partition.tile(i, m, n));
                assert_eq!(tiles.map(|(r, c)| r.len() * c.len()).sum::<usize>(), m * n, "{partition:?}");
            }
        }
    }

    #[test]
    fn two_threads_share_evenly() {
        for transposed in [[false; 2], [true, false], [false, true]] {
            for [m, k, n] in [[256, 256, 256], [512, 512, 512], [2048, 384, 1152], [1152, 2048, 384]] {
                let partition = partition(m, k, n, transposed, 2);
                assert!(partition.tiles().is_multiple_of(2), "{partition:?}");
            }
        }
    }

    #[test]
    fn small_products_stay_whole() {
        assert_eq!(partition(64, 64, 64, [false; 2], 16).tiles(), 1);
    }
}
