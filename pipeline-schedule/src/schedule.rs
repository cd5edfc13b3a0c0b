//! A schedule: one list of actions per rank.

use numcore::{Error, Result};

use super::action::{Action, Compute, Message, Pass};
use super::placement::StagePlacement;

/// The actions of every rank, in order. [`check`](Schedule::check) tells whether they can run.
///
/// **Invariant**: every action is on the rank of its stage, and its stage and micro-batch exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    placement: StagePlacement,
    micros: usize,
    rows: Vec<Vec<Action>>,
}

impl Schedule {
    /// Makes a schedule in which `rows[rank]` has the actions of a rank, in order.
    ///
    /// # Errors
    /// Fails if there is not one row per rank, or if there are more micro-batches than actions. Each action must be on
    /// the rank of its stage, and its stage and micro-batch must exist.
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

    /// The placement of stages on ranks.
    pub fn placement(&self) -> &StagePlacement {
        &self.placement
    }

    /// The number of micro-batches in one execution of the schedule, `n_microbatches` of
    /// `torch.distributed.pipelining`.
    pub fn micro_batches(&self) -> usize {
        self.micros
    }

    /// The number of stages of the model.
    pub fn stages(&self) -> usize {
        self.placement.stages()
    }

    /// The actions of every rank.
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

    /// Tells whether the schedule has messages or units, as after [`lower`](Schedule::lower).
    pub(crate) fn is_lowered(&self) -> bool {
        self.actions().any(|(_, _, action)| !action.is_compute())
    }

    /// Tells whether the schedule has no backward pass: an evaluation.
    pub fn is_forward_only(&self) -> bool {
        self.actions().flat_map(|(_, _, action)| action.computes()).all(|compute| compute.pass == Pass::F)
    }

    /// The source of a pass's input.
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

    /// The message that sends a pass's output to another rank. `None` if the output stays on its rank, or the pass has
    /// none for another stage.
    pub fn output(&self, compute: Compute) -> Option<Message> {
        let send = compute.send(self.stages())?;
        let recv = send.peer()?;
        (!self.placement.together(send.stage, recv.stage)).then_some(send)
    }
}

/// The source of a pass's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassInput {
    /// No other pass: the input is the batch, the loss or, for W, the I of its own stage.
    Nothing,
    /// A pass of this stage on the same rank.
    Here(usize),
    /// The message that receives it from another rank.
    Received(Message),
}
