//! 1F1B, or PipeDream-flush (Narayanan et al. 2021): p−r forwards ahead, then one backward for one forward. Idle
//! (p−1)(F+B) per rank, as GPipe; min(p−r, m) live micro-batches.

use super::{Generator, ONE_STAGE, RowBuilder, Size, StageLayout};

pub(super) const GENERATOR: Generator = Generator { shape: StageLayout::Loop, needs: &[ONE_STAGE], row };

fn row(Size { p, m, .. }: Size, r: usize, row: RowBuilder) -> RowBuilder {
    let ahead = (p - r).min(m);
    row.repeat(ahead, |row| row.f(0)).repeat(m - ahead, |row| row.b(0).f(0)).repeat(ahead, |row| row.b(0))
}
