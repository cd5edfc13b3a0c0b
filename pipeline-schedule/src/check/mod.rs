//! Whether a schedule can be run: all ranks together, before any of them starts.
//!
//! Two parts. Each row is held to a table of what every action needs and makes (`facts`): that finds whatever is missing, twice, or
//! out of order on one rank. Then all rows are played with synchronous sends: that finds deadlocks, and messages whose ends
//! stand in different orders, since then two ranks wait for each other. A schedule that passes runs with any
//! way of sending: what is buffered or overlapped waits for less.

mod facts;
mod row;

use numcore::Result;

use super::action::{Action, UnitAction, UnitOp};
use super::costs::Costs;
use super::deadlock::deadlock_error;
use super::replay::{SendMode, replay};
use super::schedule::Schedule;

const OP: &str = "pipeline check";

/// A schedule that can be run. Only [`Schedule::check`] makes one.
///
/// Whoever runs it gives each rank its [`row`](Checked::row) and does it in order. It may rely on this:
///
/// - Between any two ranks, messages leave and arrive in the same order: channels need neither tags nor buffers. A send may
///   return at once or when it is received; a receive may return at once too, if the pass that reads it waits for it.
/// - A send stands after the pass that makes its value, a receive before the pass that reads it, on that rank. Where
///   neighbouring stages share a rank there is no message: the value stays where it is.
/// - The two passes of an overlap are independent: they may run in either order, or at once.
/// - Every W comes after its I, every B stands alone; at REDUCE_GRAD a stage's gradients of all micro-batches are in, and no
///   pass adds to them afterwards.
/// - Units are no messages: with several replicas of the pipeline, equal ranks do equal units in equal order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    schedule: Schedule,
    sharded: bool,
}

/// What a rank may hold at once; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Micro-batches, summed over the rank's stages, between F and B or W.
    pub live: Option<usize>,
    /// Stages between UNSHARD and RESHARD.
    pub gathered: Option<usize>,
}

impl Schedule {
    /// Checks a lowered schedule.
    ///
    /// On each rank: every micro-batch goes once through F and then B, or I and then W, of every stage (through F alone if no rank
    /// has a backward pass: an evaluation, which reduces nothing); what a pass reads was made
    /// or received before, what it makes for another rank is sent once after it, and nothing else is sent or received; every stage's
    /// gradients are reduced once, after their last part; if any stage is ever gathered, every stage is while it is used and
    /// none is left gathered. Jointly: with synchronous sends, every rank ends.
    ///
    /// # Errors
    /// Name the rank, the position in its row, the action, and what it needs or waits for.
    pub fn check(self, limits: Limits) -> Result<Checked> {
        let is_shard =
            |action| matches!(action, Action::Unit(UnitAction { op: UnitOp::Unshard | UnitOp::Reshard, .. }));
        let sharded = self.actions().any(|(_, _, action)| is_shard(action));
        for rank in 0..self.rows().len() {
            row::check(&self, rank, sharded, limits)?;
        }
        replay(&self, &Costs::uniform(0, 0, 0), SendMode::Synchronous).map_err(|stuck| deadlock_error(OP, &stuck))?;
        Ok(Checked { schedule: self, sharded })
    }
}

impl Checked {
    /// What was checked.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Whether it evaluates: forwards alone.
    pub fn is_forward_only(&self) -> bool {
        self.schedule.is_forward_only()
    }

    /// What a rank does, in order; empty for a rank there is not.
    pub fn row(&self, rank: usize) -> &[Action] {
        self.schedule.rows().get(rank).map_or(&[], Vec::as_slice)
    }

    /// Whether stages are gathered and freed (ZeRO-3).
    pub fn is_sharded(&self) -> bool {
        self.sharded
    }
}
