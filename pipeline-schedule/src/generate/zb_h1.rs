//! ZB-H1 (Qi et al. 2023): 1F1B with r deferred weight gradients on rank r, which fill the bubble at the end. Idle
//! (p−1)(F+I−W) per rank; p live micro-batches on every rank (1F1B's p−r, and r that wait for their W). With fewer
//! micro-batches than ranks (2 ≤ m < p) the first I is followed by its W at once (`I0 W0 I1 W1`). Torch's order is
//! `I0 I1 W0 W1`: these are the same actions, and both orders are valid.

use super::{Generator, ONE_STAGE, RowBuilder, StageLayout};

pub(super) const GENERATOR: Generator =
    Generator { shape: StageLayout::Loop, needs: &[ONE_STAGE], row: |size, r, row| split(size.m, size.p - r, r, row) };

/// `ahead` forwards; then I and F in turn, with a W after each I that leaves more than `waiting` deferred. After the
/// forwards, I and W in turn. ZB-H2 uses it with other numbers.
pub(super) fn split(m: usize, ahead: usize, waiting: usize, row: RowBuilder) -> RowBuilder {
    let ahead = ahead.min(m);
    let pay = move |row: RowBuilder| if row.deferred() > waiting { row.w() } else { row };
    let row = row.repeat(ahead, |row| row.f(0)).repeat(m - ahead, |row| pay(row.i(0)).f(0));
    row.repeat(ahead, |row| row.i(0).w())
}
