//! Playing a schedule: all ranks jointly, each through its list in order.
//!
//! One engine serves three callers. `check` asks if the schedule ends, `simulate` and `lower` need the time of each
//! action, and `csv` its column. Times do not depend on the order in which ranks are visited. The start of an action is
//! the latest of its rank's previous end and its inputs' arrivals, all fixed by the lists.

use super::action::{Action, Compute, Direction, End, Message, Pass};
use super::costs::Costs;
use super::schedule::{PassInput, Schedule};

/// The time for which a message occupies the ranks at its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendMode {
    /// Neither end waits; only the pass that reads the message does.
    Overlapped,
    /// Rendezvous: both ends wait for each other, and for the transfer.
    Synchronous,
}

/// The time of an action, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The start, in ticks from the start of the step.
    pub start: u64,
    /// The end, in ticks from the start of the step.
    pub end: u64,
}

/// A rank that cannot continue.
#[derive(Clone, Debug)]
pub(super) struct BlockedRank {
    pub rank: usize,
    pub position: usize,
    pub action: Action,
    pub waits: String,
    /// The rank that this rank waits for, if it waits for one.
    pub on: Option<usize>,
}

/// The time of each action of each rank, or every rank that cannot continue.
///
/// A schedule without messages is played as if each result were sent as soon as it is made.
pub(super) fn replay(schedule: &Schedule, costs: &Costs, sends: SendMode) -> Result<Vec<Vec<Span>>, Vec<BlockedRank>> {
    let mut player = Replay::new(schedule, costs, sends);
    while player.round() {}
    let stuck = player.stuck();
    if stuck.is_empty() { Ok(player.spans) } else { Err(stuck) }
}

struct Replay<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    sends: SendMode,
    /// True if results go to other ranks without messages.
    implicit: bool,
    /// The times of the actions played so far, per rank. The length of a list is the rank's position.
    spans: Vec<Vec<Span>>,
    /// The time at which a stage's output, and its input's gradient, was made.
    made: [TimeTable; 2],
    /// The time at which a message arrived at a stage.
    arrived: [TimeTable; 2],
}

/// A time per stage and micro-batch.
struct TimeTable {
    micros: usize,
    /// [`UNKNOWN`] until it is set.
    times: Vec<u64>,
}

/// No time of a schedule.
const UNKNOWN: u64 = u64::MAX;

impl TimeTable {
    fn new(schedule: &Schedule) -> Self {
        let micros = schedule.micro_batches();
        TimeTable { micros, times: vec![UNKNOWN; schedule.stages() * micros] }
    }

    fn get(&self, stage: usize, micro: usize) -> Option<u64> {
        Some(self.times[stage * self.micros + micro]).filter(|time| *time != UNKNOWN)
    }

    fn set(&mut self, stage: usize, micro: usize, time: u64) {
        // A sum of times that saturates is a time still.
        self.times[stage * self.micros + micro] = time.min(UNKNOWN - 1);
    }
}

impl<'a> Replay<'a> {
    fn new(schedule: &'a Schedule, costs: &'a Costs, sends: SendMode) -> Self {
        let table = || TimeTable::new(schedule);
        Replay {
            schedule,
            costs,
            sends,
            implicit: !schedule.actions().any(|(_, _, action)| matches!(action, Action::Message(_))),
            spans: schedule.rows().iter().map(|row| Vec::with_capacity(row.len())).collect(),
            made: [table(), table()],
            arrived: [table(), table()],
        }
    }

    fn head(&self, rank: usize) -> Option<Action> {
        self.schedule.rows()[rank].get(self.spans[rank].len()).copied()
    }

    fn free(&self, rank: usize) -> u64 {
        self.spans[rank].last().map_or(0, |span| span.end)
    }

    /// Advances every rank as far as possible. True if any rank moved.
    fn round(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.spans.len() {
            while self.advance(rank) {
                moved = true;
            }
        }
        moved
    }

    fn advance(&mut self, rank: usize) -> bool {
        match self.head(rank) {
            None => false,
            Some(Action::Message(message)) if self.sends == SendMode::Synchronous => self.transfer(rank, message),
            Some(Action::Message(message)) => self.post(rank, message),
            Some(action) => self.run(rank, action),
        }
    }

    fn run(&mut self, rank: usize, action: Action) -> bool {
        let Some(ready) = action.computes().map(|compute| self.ready(compute)).try_fold(0, |a, b| Some(a.max(b?)))
        else {
            return false;
        };
        let start = ready.max(self.free(rank));
        let end = start.saturating_add(self.costs.occupies(action));
        self.spans[rank].push(Span { start, end });
        for compute in action.computes() {
            self.finish(compute, end);
        }
        true
    }

    /// The time at which a pass's inputs are ready; `None` if they are not yet.
    fn ready(&self, compute: Compute) -> Option<u64> {
        let Compute { stage, pass, micro } = compute;
        let own = match pass {
            Pass::F => 0,
            Pass::B | Pass::I => self.made[Direction::Forward as usize].get(stage, micro)?,
            Pass::W => self.made[Direction::Backward as usize].get(stage, micro)?,
        };
        let input = match self.schedule.input(compute) {
            PassInput::Nothing => 0,
            PassInput::Here(from) => self.made[pass.makes()? as usize].get(from, micro)?,
            PassInput::Received(recv) => self.arrived[recv.direction as usize].get(stage, micro)?,
        };
        Some(own.max(input))
    }

    fn finish(&mut self, compute: Compute, end: u64) {
        if let Some(direction) = compute.pass.makes() {
            self.made[direction as usize].set(compute.stage, compute.micro, end);
        }
        if let Some(send) = self.schedule.output(compute).filter(|_| self.implicit) {
            self.arrive(send, end);
        }
    }

    /// Records the arrival of a message sent at `time`.
    fn arrive(&mut self, send: Message, time: u64) {
        if let Some(recv) = send.peer().filter(|recv| recv.stage < self.schedule.stages()) {
            self.arrived[send.direction as usize].set(recv.stage, recv.micro, time.saturating_add(self.costs.comm));
        }
    }

    /// Posts an overlapped message, in no time.
    fn post(&mut self, rank: usize, message: Message) -> bool {
        if message.end == End::Send {
            if self.made[message.direction as usize].get(message.stage, message.micro).is_none() {
                return false;
            }
            self.arrive(message, self.free(rank));
        }
        let now = self.free(rank);
        self.spans[rank].push(Span { start: now, end: now });
        true
    }

    /// Plays a synchronous message, once both ends have reached it.
    fn transfer(&mut self, rank: usize, message: Message) -> bool {
        let Some((peer, other)) = self.partner(message) else { return false };
        if self.head(other) != Some(peer.into()) {
            return false;
        }
        let send = if message.end == End::Send { message } else { peer };
        if self.made[send.direction as usize].get(send.stage, send.micro).is_none() {
            return false;
        }
        let start = self.free(rank).max(self.free(other));
        self.arrive(send, start);
        for rank in [rank, other] {
            self.spans[rank].push(Span { start, end: start.saturating_add(self.costs.comm) });
        }
        true
    }

    fn partner(&self, message: Message) -> Option<(Message, usize)> {
        let peer = message.peer()?;
        Some((peer, self.schedule.placement().rank_of(peer.stage)?))
    }

    fn stuck(&self) -> Vec<BlockedRank> {
        let heads = (0..self.spans.len()).filter_map(|rank| Some((rank, self.head(rank)?)));
        heads
            .map(|(rank, action)| BlockedRank {
                rank,
                position: self.spans[rank].len(),
                action,
                waits: self.waits(action),
                on: self.waits_on(action),
            })
            .collect()
    }

    fn waits(&self, action: Action) -> String {
        match action {
            Action::Message(message) => self.partner(message).map_or("nobody".into(), |(peer, rank)| {
                let stands = self.head(rank).map_or("has ended".into(), |head| format!("stands at {head}"));
                format!("{peer} of rank {rank}, which {stands}")
            }),
            _ => action.computes().find_map(|compute| self.missing(compute)).unwrap_or_default(),
        }
    }

    fn waits_on(&self, action: Action) -> Option<usize> {
        let received = |compute| match self.schedule.input(compute) {
            PassInput::Received(recv) => self.partner(recv),
            _ => None,
        };
        let (_, rank) = match action {
            Action::Message(message) => self.partner(message),
            _ => action.computes().find_map(received),
        }?;
        Some(rank)
    }

    /// The missing input of a pass that is not ready.
    fn missing(&self, compute: Compute) -> Option<String> {
        let Compute { stage, pass, micro } = compute;
        let own = match pass {
            Pass::F => None,
            Pass::B | Pass::I => self.lacks(Direction::Forward, stage, micro),
            Pass::W => self.lacks(Direction::Backward, stage, micro),
        };
        own.or_else(|| match self.schedule.input(compute) {
            PassInput::Nothing => None,
            PassInput::Here(from) => self.lacks(pass.makes()?, from, micro),
            PassInput::Received(recv) => {
                self.arrived[recv.direction as usize].get(stage, micro).is_none().then(|| recv.to_string())
            }
        })
    }

    fn lacks(&self, direction: Direction, stage: usize, micro: usize) -> Option<String> {
        let what = if direction == Direction::Forward { "output" } else { "input gradient" };
        let lacks = self.made[direction as usize].get(stage, micro).is_none();
        lacks.then(|| format!("the {what} of stage {stage} for micro-batch {micro}"))
    }
}
