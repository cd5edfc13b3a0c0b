//! How a product is cut into tiles for threads: the cut that a small model of their cost finds cheapest.

use std::ops::Range;

use super::{GRAIN, Product};

/// Rows and columns of tiles are multiples of these: of a strip and of a register where both are largest.
const ROWS: usize = 8;
const COLUMNS: usize = 16;

/// The part of its last task by which a thread is late, about.
pub(super) const LATE: f64 = 0.1;

/// Tiles of one matrix of the output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cut {
    rows: usize,
    columns: usize,
    across: usize,
    tiles: usize,
}

impl Cut {
    /// For so many threads.
    pub(super) fn of(p: &Product, threads: usize) -> Cut {
        // Nobody waits for one thread, and rows are read again for every tile of their columns: 3 % of a product of 1024³. (Tiles of
        // bf16 multiply faster where they are smaller.)
        let late = if threads > 1 { LATE } else { 0.0 };
        Cut::cheapest(p, threads, (GRAIN, late), [ROWS, COLUMNS], |tile| p.cost(tile))
    }

    /// The cut into tiles of at least `grain` multiplications, their sizes multiples of `step`, that is cheapest where the largest tile
    /// takes `cost([rows, columns])`, and a thread is late by such a part of its last task.
    pub(super) fn cheapest(
        p: &Product,
        threads: usize,
        (grain, late): (usize, f64),
        step: [usize; 2],
        cost: impl Fn([usize; 2]) -> f64,
    ) -> Cut {
        let batch = p.batch.len().max(1);
        let most = (p.m * p.n * p.k / grain).clamp(1, (4 * threads).div_ceil(batch));
        let cost = |cut: &Cut| {
            let tasks = (batch * cut.tiles) as f64;
            ((tasks / threads as f64).ceil() + late) * cost([cut.rows.min(p.m), cut.columns.min(p.n)])
        };
        let new = |down, across| Cut::new([p.m, p.n], [down, across], step);
        let cuts = (1..=most).flat_map(|down| (1..=most / down).map(move |across| new(down, across)));
        cuts.min_by(|x, y| cost(x).total_cmp(&cost(y))).unwrap_or_else(|| new(1, 1))
    }

    fn new([m, n]: [usize; 2], [down, across]: [usize; 2], step: [usize; 2]) -> Cut {
        let rows = m.div_ceil(down).next_multiple_of(step[0]);
        let columns = n.div_ceil(across).next_multiple_of(step[1]);
        let across = n.div_ceil(columns);
        Cut { rows, columns, across, tiles: m.div_ceil(rows) * across }
    }

    pub(super) fn tiles(&self) -> usize {
        self.tiles
    }

    /// Rows and columns of a tile.
    pub(super) fn tile(&self, i: usize, m: usize, n: usize) -> (Range<usize>, Range<usize>) {
        let (row, column) = (i / self.across * self.rows, i % self.across * self.columns);
        (row..m.min(row + self.rows), column..n.min(column + self.columns))
    }
}

impl Product {
    /// Of the largest tile, in steps of a strip against a panel: sums, and what is read and copied for it.
    fn cost(&self, tile: [usize; 2]) -> f64 {
        let [rows, columns] = tile.map(|n| n as f64);
        // A panel that is not full is read as often for fewer sums.
        let panels = (columns / 48.0).floor() + [0.0, 0.5, 0.75, 1.0][(columns % 48.0 / 16.0).ceil() as usize];
        let sums = (rows / 8.0).ceil() * panels * 12.0;
        let columns_copied = columns * if self.b[1] == 1 { 0.6 } else { 1.0 };
        // What is copied comes from far away, at a few bytes a cycle. Rows that are read where they lie come again for every tile of their
        // columns.
        let rows_read = rows * if self.a[1] == 1 { 0.1 } else { 1.0 };
        (sums + columns_copied + rows_read) * self.k as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::walk::Walk;

    fn of(m: usize, k: usize, n: usize, turned: [bool; 2], threads: usize) -> Cut {
        let strides = |t: bool, line: usize| if t { [1, 1000] } else { [line as isize, 1] };
        let batch = Walk::of([]);
        let (a, b) = (strides(turned[0], k), strides(turned[1], n));
        Cut::of(&Product { batch, m, k, n, a, b, out: [n as isize, 1] }, threads)
    }

    #[test]
    fn tiles_cover_once() {
        for (m, n) in [(1, 1), (1024, 1024), (512, 50257), (50257, 512), (7, 9), (1, 4096), (4096, 1), (100, 200)] {
            for threads in [1, 2, 3, 16] {
                let cut = of(m, 512, n, [false; 2], threads);
                let tiles = (0..cut.tiles()).map(|i| cut.tile(i, m, n));
                assert_eq!(tiles.map(|(r, c)| r.len() * c.len()).sum::<usize>(), m * n, "{cut:?}");
            }
        }
    }

    #[test]
    fn two_threads_share_evenly() {
        for turned in [[false; 2], [true, false], [false, true]] {
            for [m, k, n] in [[256, 256, 256], [512, 512, 512], [2048, 384, 1152], [1152, 2048, 384]] {
                let cut = of(m, k, n, turned, 2);
                assert!(cut.tiles().is_multiple_of(2), "{cut:?}");
            }
        }
    }

    #[test]
    fn small_products_stay_whole() {
        assert_eq!(of(64, 64, 64, [false; 2], 16).tiles(), 1);
    }
}
