//! The check that a schedule can run, for all ranks together, before any of them starts.
//!
//! It has two parts. First, each row is compared with a table of the facts that every action needs and makes (`facts`).
//! This finds everything missing, repeated, or out of order on one rank. Then all rows are played with synchronous
//! sends. That finds deadlocks, and messages whose ends are in different orders, since two ranks then wait for each
//! other. A checked schedule runs with any kind of send: buffered or overlapped sends wait for less.

mod facts;
mod row;

use numcore::Result;

use super::action::{Action, UnitAction, UnitOp};
use super::costs::Costs;
use super::deadlock::deadlock_error;
use super::replay::{SendMode, replay};
use super::schedule::Schedule;

const OP: &str = "pipeline check";

/// A schedule that can run. Only [`Schedule::check`] makes one.
///
/// An executor runs the actions of each rank's [`row`](Checked::row) in order. It may rely on this:
///
/// - Between any two ranks, messages leave and arrive in one order: channels need neither tags nor buffers. A send may
///   return at once or when it is received. A receive may return at once too, if the pass that reads it waits for it.
/// - A send is after the pass that makes its value, a receive before the pass that reads it, on that rank. Neighboring
///   stages on one rank have no message: the value stays there.
/// - The two passes of an overlap are independent: they may run in either order, or at once.
/// - Every W comes after its I, and every B has neither. At REDUCE_GRAD a stage's gradients of all micro-batches are
///   complete, and no pass adds to them afterwards.
/// - Units are no messages: in several replicas of the pipeline, ranks of the same stages run equal units in equal
///   order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    schedule: Schedule,
    sharded: bool,
}

/// Memory limits of each rank, as counts, that [`Schedule::check`] enforces; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Micro-batches in flight, summed over the rank's stages. They are past their forward pass (F), and not yet past
    /// their backward pass (B, or W if it is split).
    pub live: Option<usize>,
    /// Stages whose parameters, sharded by ZeRO stage 3, are gathered at once.
    pub gathered: Option<usize>,
}

impl Schedule {
    /// Checks a lowered schedule.
    ///
    /// On each rank:
    ///
    /// - Every micro-batch goes once through F and then B, or I and then W, of every stage. If no rank has a backward
    ///   pass, it goes through F alone: an evaluation, which reduces nothing.
    /// - The input of a pass was made or received before. Its output for another rank is sent once after it. Nothing
    ///   else is sent or received.
    /// - Every stage's gradients are reduced once, after their last part.
    /// - If any stage is ever gathered, every stage is gathered while it is used, and none at the end.
    ///
    /// Jointly, with synchronous sends, every rank ends.
    ///
    /// # Errors
    /// Fails if one of these does not hold. The error names the rank, the position in its row, the action, and the fact
    /// or message that it lacks.
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
    /// The checked schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Tells whether the schedule is an evaluation: forwards alone.
    pub fn is_forward_only(&self) -> bool {
        self.schedule.is_forward_only()
    }

    /// The actions of a rank, in order; empty if `rank` is out of range.
    pub fn row(&self, rank: usize) -> &[Action] {
        self.schedule.rows().get(rank).map_or(&[], Vec::as_slice)
    }

    /// Tells whether stages are gathered and freed (ZeRO-3).
    pub fn is_sharded(&self) -> bool {
        self.sharded
    }
}
