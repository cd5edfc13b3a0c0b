//! ZB-H1 over v stages per rank: interleaved 1F1B whose deferred weight gradients fill the bubble at the end
//! (`torch.distributed.pipelining` has this order).
//!
//! Idle (p−1)(F+I−W)/v per rank, where F, I and W are a rank's complete passes. At most (v−1)g + p live chunks on every
//! rank, in rounds of g micro-batches as in interleaved 1F1B.

use super::{
    Generator, StageLayout,
    interleaved::{EVEN_ROUNDS, FILLED, InterleavedOrder},
};

pub(super) const GENERATOR: Generator = Generator {
    shape: StageLayout::Loop,
    needs: &[FILLED, EVEN_ROUNDS],
    row: |size, r, row| {
        let order = InterleavedOrder::new(size);
        order.row(order.before_last_stage() + size.p - 1 - r, row, |row, stage, micro| {
            let row = row.i_of(stage, micro);
            if row.deferred() > r { row.w() } else { row }
        })
    },
};
