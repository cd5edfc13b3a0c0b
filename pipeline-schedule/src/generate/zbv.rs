//! ZBV (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): zero bubble on a fold. The loss is on rank 0,
//! so a rank's two stages balance each other's wait. No gaps if F = I = W; 2p live chunks on every rank.

use super::{Generator, Need, RowBuilder, Size, StageLayout, TWO_STAGES};

const FILLED: Need = ("m ≥ 2p − 1", |size| size.m >= 2 * size.p - 1);

pub(super) const GENERATOR: Generator = Generator { shape: StageLayout::Fold, needs: &[TWO_STAGES, FILLED], row };

/// Chunk 0 is the stage on the way down, chunk 1 the one on the way up.
fn row(Size { p, m, .. }: Size, r: usize, row: RowBuilder) -> RowBuilder {
    let below = p - r;
    let row = row.repeat(2 * below - 1, |row| row.f(0)).repeat(r, |row| row.f(1).f(0));
    let row = row.repeat(below, |row| row.f(1).i(1).w_of(1));
    let row = row.repeat(m - p, |row| {
        let row = if row.forwards(0) < m { row.f(0) } else { row };
        row.i(0).w_of(0).f(1).i(1).w_of(1)
    });
    let row = row.repeat(r, |row| row.i(0).i(1)).repeat(below, |row| row.i(0).w_of(0));
    row.repeat(r, |row| row.w_of(1))
}
