//! DualPipeV (DeepSeek's DualPipe cut in half by Sea AI Lab, 2025): on a fold, forwards of one stage overlap with
//! backwards of the other. Idle (p−1)(F&B + B − 3W), where F&B is an overlapped pair, for F = I ≥ W; 2p+1 live chunks
//! on every rank.

use super::{Generator, Need, RowBuilder, Size, StageLayout, TWO_STAGES};

const FILLED: Need = ("m ≥ 2p", |size| size.m >= 2 * size.p);

pub(super) const GENERATOR: Generator = Generator { shape: StageLayout::Fold, needs: &[TWO_STAGES, FILLED], row };

/// Chunk 0 is the stage on the way down, chunk 1 the one on the way up.
fn row(Size { p, m, .. }: Size, r: usize, row: RowBuilder) -> RowBuilder {
    let below = p - r - 1;
    let row = row.repeat(2 * below, |row| row.f(0)).repeat(r + 1, |row| row.f(0).f(1));
    let row = row.repeat(below, |row| row.i(1).w().f(1));
    let row = steady(m + r + 1 - 2 * p, below == 0, row);
    let row = row.repeat(below, |row| row.b(1).overlap(1, 0));
    // The last r+1 backwards of each stage in turn; the second half leave their W to fill the end.
    let whole = r + 1;
    let row = (0..2 * (r + 1)).fold(row, |row, k| if k < whole { row.b(1 - k % 2) } else { row.i(1 - k % 2) });
    row.repeat(below, |row| row.w().i(0))
}

/// The last rank, at the fold, has nothing to overlap its first pair with: both halves would wait for the longer.
fn steady(pairs: usize, at_the_fold: bool, row: RowBuilder) -> RowBuilder {
    let row = if at_the_fold { row.f(0).b(1) } else { row.overlap(0, 1) }.overlap(1, 0);
    row.repeat(pairs - 1, |row| row.overlap(0, 1).overlap(1, 0))
}
