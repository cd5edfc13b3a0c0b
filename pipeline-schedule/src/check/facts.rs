//! Facts that every action needs on its rank, and facts that it makes true. No fact may be made true twice.

use std::fmt;

use crate::action::{Action, Compute, Direction, End, Message, Pass, UnitAction, UnitOp};
use crate::schedule::{PassInput, Schedule};

/// A statement that is true from some position of a row on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fact {
    /// A stage's output, or its input's gradient, exists.
    Made(Direction, usize, usize),
    /// A stage's weight gradients of a micro-batch are final.
    Weights(usize, usize),
    /// A message has been sent or received.
    Passed(Message),
    /// A stage's gradients have been reduced.
    Reduced(usize),
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Fact::Made(Direction::Forward, stage, micro) => write!(f, "{stage}F{micro}"),
            Fact::Made(Direction::Backward, stage, micro) => write!(f, "{stage}B{micro} (or {stage}I{micro})"),
            Fact::Weights(stage, micro) => write!(f, "{stage}B{micro} (or {stage}W{micro})"),
            Fact::Passed(message) => message.fmt(f),
            Fact::Reduced(stage) => UnitAction { stage, op: UnitOp::ReduceGrad }.fmt(f),
        }
    }
}

/// The facts that an action needs.
pub(super) fn needs(schedule: &Schedule, action: Action) -> Vec<Fact> {
    match action {
        Action::Message(Message { stage, direction, end: End::Send, micro }) => {
            vec![Fact::Made(direction, stage, micro)]
        }
        Action::Unit(UnitAction { stage, op: UnitOp::ReduceGrad }) => {
            (0..schedule.micro_batches()).map(|micro| Fact::Weights(stage, micro)).collect()
        }
        _ => action.computes().flat_map(|compute| pass_needs(schedule, compute)).collect(),
    }
}

fn pass_needs(schedule: &Schedule, compute: Compute) -> impl Iterator<Item = Fact> + use<> {
    let Compute { stage, pass, micro } = compute;
    let own = match pass {
        Pass::F => None,
        Pass::B | Pass::I => Some(Fact::Made(Direction::Forward, stage, micro)),
        Pass::W => Some(Fact::Made(Direction::Backward, stage, micro)),
    };
    let input = match schedule.input(compute) {
        PassInput::Nothing => None,
        PassInput::Here(from) => pass.makes().map(|direction| Fact::Made(direction, from, micro)),
        PassInput::Received(recv) => Some(Fact::Passed(recv)),
    };
    own.into_iter().chain(input)
}

/// The facts that an action makes true.
pub(super) fn makes(action: Action) -> Vec<Fact> {
    match action {
        Action::Message(message) => vec![Fact::Passed(message)],
        Action::Unit(UnitAction { stage, op: UnitOp::ReduceGrad }) => vec![Fact::Reduced(stage)],
        _ => action.computes().flat_map(pass_makes).collect(),
    }
}

fn pass_makes(compute: Compute) -> impl Iterator<Item = Fact> {
    let Compute { stage, pass, micro } = compute;
    let made = pass.makes().map(|direction| Fact::Made(direction, stage, micro));
    made.into_iter().chain(pass.makes_weight_gradient().then_some(Fact::Weights(stage, micro)))
}

/// The facts that must be true of a rank at the end of a step.
pub(super) fn expected(schedule: &Schedule, rank: usize, forward_only: bool) -> Vec<Fact> {
    let passes: &[Pass] = if forward_only { &[Pass::F] } else { &[Pass::F, Pass::B] };
    let mut facts = Vec::new();
    for stage in schedule.placement().stages_on(rank) {
        for micro in 0..schedule.micro_batches() {
            for &pass in passes {
                let compute = Compute { stage, pass, micro };
                facts.extend(pass_makes(compute));
                facts.extend(schedule.output(compute).map(Fact::Passed));
            }
        }
        facts.extend((!forward_only).then_some(Fact::Reduced(stage)));
    }
    facts
}
