//! Simulation of a schedule: its duration, idle time, and activations held.

use numcore::Result;

use super::action::{Action, End};
use super::costs::Costs;
use super::deadlock::deadlock_error;
use super::replay::{SendMode, Span, replay};
use super::schedule::Schedule;

/// A schedule with the times of all its actions.
#[derive(Clone, Debug)]
pub struct Simulation<'a> {
    schedule: &'a Schedule,
    spans: Vec<Vec<Span>>,
    costs: Costs,
}

/// Measurements of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankReport {
    /// Ticks spent computing.
    pub work: u64,
    /// Ticks of the complete step in which it did not compute.
    pub idle: u64,
    /// Ticks between its own first and last pass in which it did not compute. These remain of `idle` if steps follow
    /// each other without a barrier.
    pub gaps: u64,
    /// The largest number of micro-batches, summed over its stages, whose activations it held at once: from F to B or
    /// W.
    pub peak_live: usize,
    /// The largest number of bytes of activations it held at once, by
    /// [`StageCosts::activations`](super::StageCosts::activations).
    pub peak_bytes: u64,
    /// The number of messages it sent.
    pub sent: usize,
}

impl Schedule {
    /// Simulates a schedule (lowered or not) with these costs.
    ///
    /// # Errors
    /// Fails if the schedule cannot end: names every stuck rank, its position, and the cause of its wait.
    pub fn simulate(&self, costs: &Costs, sends: SendMode) -> Result<Simulation<'_>> {
        let spans = replay(self, costs, sends).map_err(|stuck| deadlock_error("pipeline simulation", &stuck))?;
        Ok(Simulation { schedule: self, spans, costs: costs.clone() })
    }
}

impl Simulation<'_> {
    /// The schedule.
    pub fn schedule(&self) -> &Schedule {
        self.schedule
    }

    /// The time of each action, per rank, in the order of the schedule's rows.
    pub fn spans(&self) -> &[Vec<Span>] {
        &self.spans
    }

    /// The end of the last action.
    pub fn makespan(&self) -> u64 {
        self.spans.iter().flatten().map(|span| span.end).max().unwrap_or(0)
    }

    /// The measurements of a rank; `None` if `rank` is out of range.
    pub fn rank(&self, rank: usize) -> Option<RankReport> {
        self.rank_until(rank, self.makespan())
    }

    /// The measurements of a rank in a step of this length.
    fn rank_until(&self, rank: usize, makespan: u64) -> Option<RankReport> {
        let row = self.schedule.rows().get(rank)?;
        let passes =
            || row.iter().zip(&self.spans[rank]).filter(|(action, _)| action.is_compute()).map(|(_, span)| span);
        let work = passes().map(|span| span.end - span.start).sum();
        let own = passes().next_back().map_or(0, |last| last.end) - passes().next().map_or(0, |first| first.start);
        let bytes = |stage: usize| self.costs.stage(stage).map_or(0, |costs| costs.activations);
        Some(RankReport {
            work,
            idle: makespan - work,
            gaps: own - work,
            peak_live: peak(row, |_| 1) as usize,
            peak_bytes: peak(row, bytes),
            sent: row.iter().filter(|action| is_send(action)).count(),
        })
    }

    /// The measurements of every pipeline rank, in ascending order of ranks: work, idle time and peak memory. Times are
    /// in the ticks of the simulation's [`Costs`].
    pub fn ranks(&self) -> Vec<RankReport> {
        let makespan = self.makespan();
        (0..self.spans.len()).filter_map(|rank| self.rank_until(rank, makespan)).collect()
    }
}

fn is_send(action: &Action) -> bool {
    matches!(action, Action::Message(message) if message.end == End::Send)
}

/// The largest total weight of a row's live micro-batches, each weighted by its stage. A micro-batch is live from F to
/// B or W; both of an overlap are. A row of forwards alone keeps none beyond its pass.
fn peak(row: &[Action], weight: impl Fn(usize) -> u64) -> u64 {
    let passes = || row.iter().flat_map(Action::computes);
    if passes().all(|compute| compute.pass == super::Pass::F) {
        return passes().map(|compute| weight(compute.stage)).max().unwrap_or(0);
    }
    let (mut live, mut peak) = (0_u64, 0);
    for compute in passes() {
        if compute.pass == super::Pass::F {
            live = live.saturating_add(weight(compute.stage));
        }
        peak = peak.max(live);
        if compute.pass.makes_weight_gradient() {
            live = live.saturating_sub(weight(compute.stage));
        }
    }
    peak
}
