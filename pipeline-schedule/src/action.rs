//! The actions of a rank.
//!
//! The vocabulary and its text (see [`Action`]'s `Display` and `FromStr`) are those of `torch.distributed.pipelining`.
//! The three words that wait for the end of an asynchronous action are missing.

/// One entry of a rank's list.
#[doc(alias("PipelineAction"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// A forward or (part of a) backward pass.
    Compute(Compute),
    /// A forward and a backward pass of independent micro-batches, run as one (DualPipeV). Each hides the other's
    /// communication.
    Overlap(Compute, Compute),
    /// One end of a transfer between neighbouring stages on different ranks.
    Message(Message),
    /// An action on all parameters or gradients of a stage.
    Unit(UnitAction),
}

/// A pass of one micro-batch through one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Compute {
    /// The stage.
    pub stage: usize,
    /// The kind of pass.
    pub pass: Pass,
    /// The micro-batch.
    pub micro: usize,
}

/// The passes. `B` is `I` and `W` in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Forward.
    F,
    /// The complete backward.
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
    /// The content: an output or a gradient.
    pub direction: Direction,
    /// The end: send or receive.
    pub end: End,
    /// The micro-batch.
    pub micro: usize,
}

/// The content of a transfer between stages.
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
    /// The sender.
    Send,
    /// The receiver.
    Recv,
}

/// An action on a stage as a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitAction {
    /// The stage.
    pub stage: usize,
    /// The operation.
    pub op: UnitOp,
}

/// The operations on a stage as a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnitOp {
    /// Gather the stage's sharded parameters (ZeRO-3).
    Unshard,
    /// Free the gathered parameters.
    Reshard,
    /// The stage's gradients of all micro-batches are complete; no weight gradient comes after it. It is the earliest
    /// point at which they can be reduced over the data-parallel ranks.
    ///
    /// A training step does not wait for it. Buckets and units are sent during the last weight gradient before it
    /// (sharded gradients in each), and waited for after the schedule.
    ReduceGrad,
}

impl Action {
    /// The passes of this action: two for an overlap, of which the forward comes first; none for messages and units.
    pub fn computes(&self) -> impl Iterator<Item = Compute> + use<> {
        let (first, second) = match *self {
            Action::Compute(compute) => (Some(compute), None),
            Action::Overlap(forward, backward) => (Some(forward), Some(backward)),
            Action::Message(_) | Action::Unit(_) => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// The stages of this action; two for an overlap.
    pub fn stages(&self) -> impl Iterator<Item = usize> + use<> {
        let other = match *self {
            Action::Message(message) => Some(message.stage),
            Action::Unit(unit) => Some(unit.stage),
            _ => None,
        };
        self.computes().map(|compute| compute.stage).chain(other)
    }

    /// The micro-batches of this action; two for an overlap, none for units.
    pub fn micros(&self) -> impl Iterator<Item = usize> + use<> {
        let other = if let Action::Message(message) = *self { Some(message.micro) } else { None };
        self.computes().map(|compute| compute.micro).chain(other)
    }

    /// Tells whether this action runs a pass.
    pub fn is_compute(&self) -> bool {
        matches!(self, Action::Compute(_) | Action::Overlap(..))
    }
}

impl Compute {
    /// The message end that sends this pass's output; none for W, and none if there is no such neighbour.
    pub fn send(&self, stages: usize) -> Option<Message> {
        let direction = self.pass.makes()?;
        let message = Message { stage: self.stage, direction, end: End::Send, micro: self.micro };
        message.peer().filter(|peer| peer.stage < stages).map(|_| message)
    }

    /// The message end that receives this pass's input; none for W, and none at the ends of the pipeline.
    pub fn recv(&self, stages: usize) -> Option<Message> {
        let direction = self.pass.makes()?;
        let message = Message { stage: self.stage, direction, end: End::Recv, micro: self.micro };
        message.peer().filter(|peer| peer.stage < stages).map(|_| message)
    }
}

impl Pass {
    /// The content that this pass makes for a neighbouring stage; none for W.
    pub fn makes(self) -> Option<Direction> {
        match self {
            Pass::F => Some(Direction::Forward),
            Pass::B | Pass::I => Some(Direction::Backward),
            Pass::W => None,
        }
    }

    /// Tells whether this pass completes the stage's weight gradients of the micro-batch, and frees its activations.
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
