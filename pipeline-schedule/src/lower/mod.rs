//! From passes to everything a rank does: messages, parameter gathers, gradient reductions.

mod messages;
mod units;

use numcore::{Error, Result};

use super::costs::Costs;
use super::schedule::Schedule;

/// How to lower.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lowering {
    /// What passes and messages are expected to take: it decides where messages stand. Every pass takes at least one tick.
    /// `comm` is what a message takes while passes go on beside it; leave it 0 where a message holds its ranks.
    pub costs: Costs,
    /// Whether parameters are sharded (ZeRO-3), so that stages are gathered before use and freed after.
    pub sharded: bool,
}

impl Schedule {
    /// Adds to a schedule of passes alone: a send and a receive wherever neighbouring stages live on different ranks; a
    /// REDUCE_GRAD after each stage's last weight gradient; UNSHARD and RESHARD if parameters are sharded.
    ///
    /// The result is free of deadlock with synchronous sends, and where the expected costs allow it, no pass waits for a
    /// synchronous send either.
    ///
    /// # Errors
    /// When the schedule has been lowered, a pass costs nothing, or passes wait for each other in a circle.
    pub fn lower(&self, lowering: Lowering) -> Result<Schedule> {
        let refuse = |why: &str| Err(Error::schedule("pipeline lowering", why));
        if self.is_lowered() {
            return refuse("the schedule has messages or units already; lower passes alone");
        }
        if self.actions().any(|(_, _, action)| lowering.costs.occupies(action) == 0) {
            return refuse("every pass must cost at least one tick, or messages cannot be put in order");
        }
        let rows = messages::add(self, &lowering.costs)?;
        let rows = rows.iter().map(|row| units::add(row, lowering.sharded)).collect();
        Schedule::new(self.placement().clone(), self.micro_batches(), rows)
    }
}
