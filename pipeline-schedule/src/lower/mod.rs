//! Lowering: adds messages, parameter gathers and gradient reductions to the passes of a schedule.

mod messages;
mod units;

use numcore::{Error, Result};

use super::costs::Costs;
use super::schedule::Schedule;

/// Options of lowering.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lowering {
    /// The expected costs of passes and messages, which decide the positions of messages. Every pass takes at least one
    /// tick. `comm` is the time of a message beside running passes; leave it 0 if a message blocks its ranks.
    pub costs: Costs,
    /// True if parameters are sharded (ZeRO-3), so that stages are gathered before use and freed after.
    pub sharded: bool,
}

impl Schedule {
    /// Adds to a schedule of passes alone:
    ///
    /// - a send and a receive between neighbouring stages on different ranks;
    /// - a REDUCE_GRAD after each stage's last weight gradient;
    /// - UNSHARD and RESHARD if parameters are sharded.
    ///
    /// The result has no deadlock with synchronous sends. If the expected costs allow it, no pass waits for a
    /// synchronous send either.
    ///
    /// # Errors
    /// Fails if the schedule has messages or units already, a pass costs nothing, or passes wait for each other in a
    /// cycle.
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
