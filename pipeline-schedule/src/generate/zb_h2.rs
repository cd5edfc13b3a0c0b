//! ZB-H2 (Qi et al. 2023): 2(p−r)−1 forwards ahead, so that no rank ever waits between its first and its last pass if F
//! = I = W. Gaps (p−1)(F+I−2W) on rank 0 and fewer on the others; 2p−1 live micro-batches on every rank.

use super::zb_h1::split;
use super::{Generator, Need, ONE_STAGE, StageLayout};

/// Fewer micro-batches do not reach the last rank in time to fill the warm-up.
const FILLED: Need = ("m ≥ 2p − 1", |size| size.m >= 2 * size.p - 1);

pub(super) const GENERATOR: Generator = Generator {
    shape: StageLayout::Loop,
    needs: &[ONE_STAGE, FILLED],
    row: |size, r, row| split(size.m, 2 * (size.p - r) - 1, 2 * r, row),
};
