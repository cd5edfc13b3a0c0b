//! LoopedBFS, or breadth-first pipeline (Lamy-Poirier 2023): every micro-batch through a stage before the rank's next
//! one, and back. A ZeRO-3 stage is gathered once for its forwards and once for its backwards. Idle (p−1)(F+B)/v per
//! rank, where F and B are a rank's complete passes; vm live chunks.

use super::{Generator, RowBuilder, Size, StageLayout};
use crate::action::Pass;

pub(super) const GENERATOR: Generator = Generator { shape: StageLayout::Loop, needs: &[], row };

/// Backwards start with the micro-batch that went forward last, as in `torch.distributed.pipelining`.
fn row(Size { v, m, .. }: Size, _: usize, row: RowBuilder) -> RowBuilder {
    let each = |pass: Pass| move |row: RowBuilder, (chunk, micro): (usize, usize)| row.pass(chunk, pass, micro);
    let grid = || (0..v).flat_map(|chunk| (0..m).map(move |micro| (chunk, micro)));
    let row = grid().fold(row, each(Pass::F));
    grid().rev().fold(row, each(Pass::B))
}
