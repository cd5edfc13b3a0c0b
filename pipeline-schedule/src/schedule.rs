//! A schedule: one list of actions per rank.

use numcore::{Error, Result};

use super::action::{Action, Compute, Message, Pass};
use super::placement::StagePlacement;

/// What every rank does, in its order. Whether it can run is another question: see [`check`](Schedule::check).
///
/// Holds: every action stands on the rank of its stage and names a stage and a micro-batch there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    placement: StagePlacement,
    micros: usize,
    rows: Vec<Vec<Action>>,
}

impl Schedule {
    /// `rows[rank]` is what a rank does, in order.
    ///
    /// # Errors
    /// When there is not one row per rank, or an action stands on another rank than its stage, or names a stage or
    /// micro-batch there is not, or there are more micro-batches than actions.
    pub fn new(placement: StagePlacement, micro_batches: usize, rows: Vec<Vec<Action>>) -> Result<Self> {
        let schedule = Schedule { placement, micros: micro_batches, rows };
        if schedule.rows.len() != schedule.placement.ranks() {
            let (rows, ranks) = (schedule.rows.len(), schedule.placement.ranks());
            return Err(Error::schedule("pipeline schedule", format!("{rows} rows for {ranks} ranks")));
        }
        for (rank, position, action) in schedule.actions() {
            if let Some(why) = schedule.misplaced(rank, action) {
                return Err(
                    Error::schedule("pipeline schedule", format!("position {position}, {action}: {why}")).on_rank(rank)
                );
            }
        }
        let actions = schedule.actions().count();
        if micro_batches > actions {
            let why =
                format!("{micro_batches} micro-batches, but only {actions} actions: each needs some on every stage");
            return Err(Error::schedule("pipeline schedule", why));
        }
        Ok(schedule)
    }

    fn misplaced(&self, rank: usize, action: Action) -> Option<String> {
        let (stages, micros) = (self.placement.stages(), self.micros);
        let wrong_stage = |stage| match self.placement.rank_of(stage) {
            None => Some(format!("there are only {stages} stages")),
            Some(owner) => (owner != rank).then(|| format!("stage {stage} lives on rank {owner}")),
        };
        let wrong_micro = action.micros().any(|micro| micro >= micros);
        action.stages().find_map(wrong_stage).or(wrong_micro.then(|| format!("there are only {micros} micro-batches")))
    }

    /// Which stage lives where.
    pub fn placement(&self) -> &StagePlacement {
        &self.placement
    }

    /// How many micro-batches a step has.
    pub fn micro_batches(&self) -> usize {
        self.micros
    }

    /// How many stages the model is cut into.
    pub fn stages(&self) -> usize {
        self.placement.stages()
    }

    /// Every rank's actions.
    pub fn rows(&self) -> &[Vec<Action>] {
        &self.rows
    }

    /// Every action with its rank and its position in that rank's list.
    pub fn actions(&self) -> impl Iterator<Item = (usize, usize, Action)> + '_ {
        self.rows
            .iter()
            .enumerate()
            .flat_map(|(rank, row)| row.iter().enumerate().map(move |(position, &action)| (rank, position, action)))
    }

    /// Whether [`lower`](Schedule::lower) has been here: messages or units are present.
    pub fn is_lowered(&self) -> bool {
        self.actions().any(|(_, _, action)| !action.is_compute())
    }

    /// Whether there is no backward pass at all: an evaluation.
    pub fn is_forward_only(&self) -> bool {
        self.actions().flat_map(|(_, _, action)| action.computes()).all(|compute| compute.pass == Pass::F)
    }

    /// The source of what a pass reads.
    pub fn input(&self, compute: Compute) -> PassInput {
        let Some((recv, send)) = compute.recv(self.stages()).and_then(|recv| Some((recv, recv.peer()?))) else {
            return PassInput::Nothing;
        };
        if self.placement.together(recv.stage, send.stage) {
            PassInput::Here(send.stage)
        } else {
            PassInput::Received(recv)
        }
    }

    /// The message that takes what a pass makes to another rank, if it goes to one.
    pub fn output(&self, compute: Compute) -> Option<Message> {
        let send = compute.send(self.stages())?;
        let recv = send.peer()?;
        (!self.placement.together(send.stage, recv.stage)).then_some(send)
    }
}

/// The source of what a pass reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassInput {
    /// From the batch or the loss, or (W) from its own I.
    Nothing,
    /// From a pass of this stage on the same rank.
    Here(usize),
    /// From another rank.
    Received(Message),
}
