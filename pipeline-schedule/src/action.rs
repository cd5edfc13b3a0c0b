//! What a rank can be told to do.
//!
//! The vocabulary, and its text (see [`Action`]'s `Display` and `FromStr`), is that of `torch.distributed.pipelining` but for its three words
//! that wait for something asynchronous.

/// One entry of a rank's list.
#[doc(alias("PipelineAction"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// A forward or (part of a) backward pass.
    Compute(Compute),
    /// A forward and a backward pass of independent micro-batches run as one, each hiding the other's communication (DualPipeV).
    Overlap(Compute, Compute),
    /// One end of a transfer between neighbouring stages on different ranks.
    Message(Message),
    /// Something done to a stage's parameters or gradients as a whole.
    Unit(UnitAction),
}

/// A pass of one micro-batch through one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Compute {
    /// The stage.
    pub stage: usize,
    /// Which pass.
    pub pass: Pass,
    /// The micro-batch.
    pub micro: usize,
}

/// The passes. `B` is `I` and `W` in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Forward.
    F,
    /// The whole backward.
    B,
    /// The gradient of the stage's input alone; weight gradients are deferred.
    I,
    /// The deferred weight gradients.
    W,
}

/// One end of a transfer. `1SEND_F3` and `2RECV_F3` are the two ends of one: stage 1's output for micro-batch 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The stage at this end.
    pub stage: usize,
    /// What travels.
    pub direction: Direction,
    /// Which end this is.
    pub end: End,
    /// The micro-batch.
    pub micro: usize,
}

/// What travels between stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// A stage's output, to the next stage.
    Forward,
    /// The gradient of a stage's input, to the stage before.
    Backward,
}

/// The two ends of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum End {
    /// The side that has it.
    Send,
    /// The side that gets it.
    Recv,
}

/// An action on a whole stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitAction {
    /// The stage.
    pub stage: usize,
    /// What is done.
    pub op: UnitOp,
}

/// What can be done to a whole stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnitOp {
    /// Gather the stage's sharded parameters (ZeRO-3).
    Unshard,
    /// Free the gathered parameters.
    Reshard,
    /// The stage's gradients of all micro-batches are in; no weight gradient comes after it. Where they can be reduced
    /// over the data-parallel ranks at the earliest; a training step does not wait for it:
    /// buckets and units are sent during the last weight gradient before it (sharded gradients in each), and waited for
    /// after the schedule.
    ReduceGrad,
}

impl Action {
    /// The passes this action runs: two for an overlap, none for messages and units. The forward comes first.
    pub fn computes(&self) -> impl Iterator<Item = Compute> + use<> {
        let (first, second) = match *self {
            Action::Compute(compute) => (Some(compute), None),
            Action::Overlap(forward, backward) => (Some(forward), Some(backward)),
            Action::Message(_) | Action::Unit(_) => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// The stages this action is about; two for an overlap.
    pub fn stages(&self) -> impl Iterator<Item = usize> + use<> {
        let other = match *self {
            Action::Message(message) => Some(message.stage),
            Action::Unit(unit) => Some(unit.stage),
            _ => None,
        };
        self.computes().map(|compute| compute.stage).chain(other)
    }

    /// The micro-batches this action is about; none for units.
    pub fn micros(&self) -> impl Iterator<Item = usize> + use<> {
        let other = if let Action::Message(message) = *self { Some(message.micro) } else { None };
        self.computes().map(|compute| compute.micro).chain(other)
    }

    /// Whether this runs a pass.
    pub fn is_compute(&self) -> bool {
        matches!(self, Action::Compute(_) | Action::Overlap(..))
    }
}

impl Compute {
    /// The message end that hands on what this pass made: none for W, nor where there is no such neighbour.
    pub fn send(&self, stages: usize) -> Option<Message> {
        let direction = self.pass.makes()?;
        let message = Message { stage: self.stage, direction, end: End::Send, micro: self.micro };
        message.peer().filter(|peer| peer.stage < stages).map(|_| message)
    }

    /// The message end that brings what this pass reads: none for W, nor at the ends of the pipeline.
    pub fn recv(&self, stages: usize) -> Option<Message> {
        let direction = self.pass.makes()?;
        let message = Message { stage: self.stage, direction, end: End::Recv, micro: self.micro };
        message.peer().filter(|peer| peer.stage < stages).map(|_| message)
    }
}

impl Pass {
    /// What this pass makes for a neighbouring stage: nothing for W.
    pub fn makes(self) -> Option<Direction> {
        match self {
            Pass::F => Some(Direction::Forward),
            Pass::B | Pass::I => Some(Direction::Backward),
            Pass::W => None,
        }
    }

    /// Whether the stage's weight gradients of the micro-batch are final after this pass (and its activations free).
    pub fn makes_weight_gradient(self) -> bool {
        matches!(self, Pass::B | Pass::W)
    }
}

impl Message {
    /// The other end; `None` before the first stage.
    pub fn peer(&self) -> Option<Message> {
        let (end, up) = match self.end {
            End::Send => (End::Recv, self.direction == Direction::Forward),
            End::Recv => (End::Send, self.direction == Direction::Backward),
        };
        let stage = if up { self.stage.checked_add(1) } else { self.stage.checked_sub(1) };
        Some(Message { stage: stage?, end, ..*self })
    }
}

impl From<Compute> for Action {
    fn from(compute: Compute) -> Self {
        Action::Compute(compute)
    }
}

impl From<Message> for Action {
    fn from(message: Message) -> Self {
        Action::Message(message)
    }
}

impl From<UnitAction> for Action {
    fn from(unit: UnitAction) -> Self {
        Action::Unit(unit)
    }
}
