//! Interleaved 1F1B whose weight gradients wait and fill the bubble at the end, as those of ZB-H1 do: ZB-H1 over v stages per rank
//! (`torch.distributed.pipelining` has the same order).
//!
//! Idle (p−1)(F+I−W)/v per rank, where F, I and W are a rank's whole passes; at most (v−1)g + p live chunks, on every rank, in rounds of g
//! micro-batches as interleaved 1F1B has them.

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
