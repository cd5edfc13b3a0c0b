//! Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM): 1F1B over v stages per rank.
//!
//! Micro-batches go in rounds of g = m / max(1, ⌊m/p⌋): a rank runs g micro-batches through a stage, then the same g through
//! its next stage. (Megatron-LM asks for m % p = 0 and has g = p; `torch.distributed.pipelining` has this g.)
//! Idle (p−1)(F+B)/v per rank, where F and B are a rank's whole passes; at most (v−1)g + 2(p−1−r) + 1 live chunks.

use super::{Generator, Need, RowBuilder, Size, StageLayout};
use crate::pipeline::action::Pass;

/// With fewer micro-batches than ranks it would run, but idle for longer than its formula: (v, m, p) = (2, 3, 4) for 6, not 4.5.
const FILLED: Need = ("m ≥ p", |size| size.m >= size.p);
const EVEN_ROUNDS: Need = ("m % max(1, ⌊m/p⌋) = 0", |size| size.m % rounds(size) == 0);

pub(super) const GENERATOR: Generator = Generator { shape: StageLayout::Loop, needs: &[FILLED, EVEN_ROUNDS], row };

fn rounds(size: Size) -> usize {
    (size.m / size.p).max(1)
}

fn row(size: Size, r: usize, row: RowBuilder) -> RowBuilder {
    let Size { p, v, m } = size;
    let g = m / rounds(size);
    // The k-th pass of a rank: which of its stages, and which micro-batch.
    let chunk = |k: usize| k / g % v;
    let micro = |k: usize| k / (g * v) * g + k % g;
    let f = |row: RowBuilder, k: usize| row.pass(chunk(k), Pass::F, micro(k));
    let b = |row: RowBuilder, k: usize| row.pass(v - 1 - chunk(k), Pass::B, micro(k));
    let (total, ahead) = (v * m, ((v - 1) * g + 2 * (p - 1 - r)).min(v * m));
    let row = (0..ahead).fold(row, f);
    let row = (ahead..total).fold(row, |row, k| b(f(row, k), k - ahead));
    (total - ahead..total).fold(row, b)
}
