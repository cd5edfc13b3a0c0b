//! GPipe (Huang et al. 2019): all forwards, then all backwards. Idle (p−1)(F+B) per rank; m live micro-batches.

use super::{Generator, ONE_STAGE, StageLayout};

pub(super) const GENERATOR: Generator = Generator {
    shape: StageLayout::Loop,
    needs: &[ONE_STAGE],
    row: |size, _, row| row.repeat(size.m, |row| row.f(0)).repeat(size.m, |row| row.b(0)),
};
