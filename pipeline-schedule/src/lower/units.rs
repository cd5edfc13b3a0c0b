//! Actions on stages as units: gathers and releases of parameters, reductions of gradients.
//!
//! A rank keeps the stage that it works on and its next one gathered. A gather then has a complete pass to hide behind,
//! and at most two stages (three during an overlap) are in memory. Units are placed behind the sends that follow the
//! previous pass: other ranks wait for those, and no rank waits for a gather.

use crate::action::{Action, End, UnitAction, UnitOp};

/// The row with its units.
pub(super) fn add(row: &[Action], sharded: bool) -> Vec<Action> {
    let mut gathered = Vec::new();
    let mut pending = if sharded { exchange(&mut gathered, &ahead(row)) } else { Vec::new() };
    let mut out = Vec::with_capacity(row.len());
    for (position, &action) in row.iter().enumerate() {
        let send = matches!(action, Action::Message(message) if message.end == End::Send);
        if !send {
            out.append(&mut pending);
        }
        out.push(action);
        if action.is_compute() {
            pending = after(action, &row[position + 1..], &mut gathered, sharded);
        }
    }
    out.append(&mut pending);
    out
}

/// The units after a pass: reductions of completed stages, then releases and gathers for the next pass.
fn after(action: Action, rest: &[Action], gathered: &mut Vec<usize>, sharded: bool) -> Vec<Action> {
    let done = action.computes().filter(|c| c.pass.makes_weight_gradient()).map(|c| c.stage);
    let done = done.filter(|&stage| !passes(rest).flatten().any(|other| other == stage));
    let mut units: Vec<Action> = done.map(|stage| UnitAction { stage, op: UnitOp::ReduceGrad }.into()).collect();
    if sharded {
        units.extend(exchange(gathered, &ahead(rest)));
    }
    units
}

/// The stages of each later pass.
fn passes(rest: &[Action]) -> impl Iterator<Item = impl Iterator<Item = usize>> {
    rest.iter().filter(|action| action.is_compute()).map(|action| action.computes().map(|compute| compute.stage))
}

/// The stages of the next pass, and the next other stage after them.
fn ahead(rest: &[Action]) -> Vec<usize> {
    let mut passes = passes(rest);
    let mut wanted: Vec<usize> = passes.next().into_iter().flatten().collect();
    wanted.dedup();
    let next = passes.flatten().find(|stage| !wanted.contains(stage));
    wanted.extend(next);
    wanted
}

/// Frees stages that are no longer needed, then gathers those that are.
fn exchange(gathered: &mut Vec<usize>, wanted: &[usize]) -> Vec<Action> {
    let free = gathered.iter().filter(|stage| !wanted.contains(stage)).map(|&stage| (stage, UnitOp::Reshard));
    let fetch = wanted.iter().filter(|stage| !gathered.contains(stage)).map(|&stage| (stage, UnitOp::Unshard));
    let units = free.chain(fetch).map(|(stage, op)| UnitAction { stage, op }.into()).collect();
    *gathered = wanted.to_vec();
    units
}
