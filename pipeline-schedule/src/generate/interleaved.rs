//! Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM): 1F1B over v stages per rank.
//!
//! Micro-batches go in rounds of g = m / max(1, ⌊m/p⌋): a rank runs g micro-batches through a stage, then these g
//! through its next stage. (Megatron-LM requires m % p = 0 and has g = p; `torch.distributed.pipelining` has this g.)
//! Idle (p−1)(F+B)/v per rank, where F and B are a rank's complete passes; at most (v−1)g + 2(p−1−r) + 1 live chunks.

use super::{Generator, Need, RowBuilder, Size, StageLayout};
use crate::action::Pass;

/// With fewer micro-batches than ranks it would run, but idle for longer than its formula: (v, m, p) = (2, 3, 4) for 6,
/// not 4.5.
pub(super) const FILLED: Need = ("m ≥ p", |size| size.m >= size.p);
pub(super) const EVEN_ROUNDS: Need = ("m % max(1, ⌊m/p⌋) = 0", |size| size.m % rounds(size) == 0);

pub(super) const GENERATOR: Generator = Generator {
    shape: StageLayout::Loop,
    needs: &[FILLED, EVEN_ROUNDS],
    row: |size, r, row| {
        let order = InterleavedOrder::new(size);
        order.row(order.before_last_stage() + 2 * (size.p - 1 - r), row, |row, stage, micro| {
            row.pass(stage, Pass::B, micro)
        })
    },
};

fn rounds(size: Size) -> usize {
    (size.m / size.p).max(1)
}

/// The stage and the micro-batch of each pass of a rank.
pub(super) struct InterleavedOrder {
    size: Size,
    /// The number of micro-batches in a round.
    g: usize,
}

impl InterleavedOrder {
    pub(super) fn new(size: Size) -> Self {
        InterleavedOrder { size, g: size.m / rounds(size) }
    }

    /// The number of forwards that a rank has before the first through its last stage.
    pub(super) fn before_last_stage(&self) -> usize {
        (self.size.v - 1) * self.g
    }

    /// `ahead` forwards, then a forward and a backward in turn, then backwards.
    pub(super) fn row(
        &self,
        ahead: usize,
        row: RowBuilder,
        backward: impl Fn(RowBuilder, usize, usize) -> RowBuilder,
    ) -> RowBuilder {
        let total = self.size.v * self.size.m;
        let ahead = ahead.min(total);
        let f = |row: RowBuilder, k: usize| row.pass(self.chunk(k), Pass::F, self.micro(k));
        let b = |row: RowBuilder, k: usize| backward(row, self.size.v - 1 - self.chunk(k), self.micro(k));
        let row = (0..ahead).fold(row, f);
        let row = (ahead..total).fold(row, |row, k| b(f(row, k), k - ahead));
        (total - ahead..total).fold(row, b)
    }

    /// The index of the stage of a rank's `k`-th pass, among the rank's stages.
    fn chunk(&self, k: usize) -> usize {
        k / self.g % self.size.v
    }

    /// The micro-batch of a rank's `k`-th pass.
    fn micro(&self, k: usize) -> usize {
        k / (self.g * self.size.v) * self.g + k % self.g
    }
}
