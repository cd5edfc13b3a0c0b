//! The check of one rank's row against the facts.

use std::collections::HashMap;

use numcore::{Error, Result};

use super::facts::{Fact, expected, makes, needs};
use super::{Limits, OP};
use crate::action::{Action, Compute, Message, Pass, UnitOp};
use crate::schedule::Schedule;

/// Checks one row against the facts and the limits, and names the position of the first failure.
pub(super) fn check(schedule: &Schedule, rank: usize, sharded: bool, limits: Limits) -> Result<()> {
    let row = &schedule.rows()[rank];
    let forward_only = schedule.is_forward_only();
    let mut walk =
        RowChecker { schedule, sharded, forward_only, limits, known: HashMap::new(), gathered: Vec::new(), live: 0 };
    for (position, &action) in row.iter().enumerate() {
        if let Err(why) = walk.step(position, action) {
            return Err(Error::schedule(OP, format!("position {position}, {action}: {why}")).on_rank(rank));
        }
    }
    match walk.missing(rank) {
        None => Ok(()),
        Some(what) => Err(Error::schedule(OP, format!("position {}, the end: {what}", row.len())).on_rank(rank)),
    }
}

struct RowChecker<'a> {
    schedule: &'a Schedule,
    sharded: bool,
    forward_only: bool,
    limits: Limits,
    /// The position since which a fact is true. The map is only looked up, so its order does not matter.
    known: HashMap<Fact, usize>,
    gathered: Vec<usize>,
    live: usize,
}

type CheckResult = std::result::Result<(), String>;

impl RowChecker<'_> {
    fn step(&mut self, position: usize, action: Action) -> CheckResult {
        self.wanted(action)?;
        let lacking = needs(self.schedule, action).into_iter().find(|fact| !self.known.contains_key(fact));
        if let Some(fact) = lacking {
            return Err(format!("waits for {fact}, which is not before it"));
        }
        for fact in makes(action) {
            if let Some(earlier) = self.known.insert(fact, position) {
                return Err(format!("repeats {fact}, done at position {earlier}"));
            }
        }
        self.hold(action)?;
        self.gather(action)
    }

    /// Requires the peer stage of a message to be on another rank.
    fn wanted(&self, action: Action) -> CheckResult {
        let Action::Message(message) = action else { return Ok(()) };
        let is_remote = |peer: &Message| {
            let placement = self.schedule.placement();
            placement.rank_of(peer.stage).is_some() && !placement.together(peer.stage, message.stage)
        };
        match message.peer().filter(is_remote) {
            Some(_) => Ok(()),
            None => Err("no other rank is at the other end of this message".into()),
        }
    }

    fn hold(&mut self, action: Action) -> CheckResult {
        let count = |of: fn(Compute) -> bool| action.computes().filter(|&compute| of(compute)).count();
        self.live += count(|compute| compute.pass == Pass::F);
        within("live micro-batches", self.live, self.limits.live)?;
        // Without backward passes no activations are kept.
        self.live -= if self.forward_only { self.live } else { count(|compute| compute.pass.makes_weight_gradient()) };
        Ok(())
    }

    fn gather(&mut self, action: Action) -> CheckResult {
        let at = |stage| self.gathered.iter().position(|&gathered| gathered == stage);
        if let Action::Unit(unit) = action {
            match (unit.op, at(unit.stage)) {
                (UnitOp::Unshard, None) => self.gathered.push(unit.stage),
                (UnitOp::Unshard, Some(_)) => {
                    return Err(format!("repeats {unit} with no {}RESHARD between", unit.stage));
                }
                (UnitOp::Reshard, Some(at)) => drop(self.gathered.remove(at)),
                (UnitOp::Reshard, None) => return Err(no_unshard(unit.stage)),
                (UnitOp::ReduceGrad, _) => {}
            }
            return within("gathered stages", self.gathered.len(), self.limits.gathered);
        }
        match action.computes().find(|compute| self.sharded && at(compute.stage).is_none()) {
            Some(compute) => Err(no_unshard(compute.stage)),
            None => Ok(()),
        }
    }

    fn missing(&self, rank: usize) -> Option<String> {
        let fact =
            expected(self.schedule, rank, self.forward_only).into_iter().find(|fact| !self.known.contains_key(fact));
        let left = self.gathered.first().map(|stage| format!("{stage}UNSHARD has no {stage}RESHARD after it"));
        fact.map(|fact| format!("{fact} is missing")).or(left)
    }
}

fn no_unshard(stage: usize) -> String {
    format!("waits for {stage}UNSHARD, which is not before it")
}

fn within(what: &str, have: usize, limit: Option<usize>) -> CheckResult {
    match limit {
        Some(limit) if have > limit => Err(format!("{have} {what}, the limit is {limit}")),
        _ => Ok(()),
    }
}
