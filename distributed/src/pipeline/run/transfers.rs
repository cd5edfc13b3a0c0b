//! Messages between ranks: several tensors each, in the order of the rows, without tags.
//!
//! Receives are posted ahead of their place, as far as their shapes are known and the order of the pair allows. An
//! engine with independent transfers posts [`AHEAD`] messages further than the current place in the row. An engine that
//! runs transfers in the order of their start gets everything in the order of the row. The row is a part of one total
//! order of all ranks' messages (see `lower/messages.rs`). Sends are asynchronous; the engine keeps sent tensors until
//! they have been received.

use std::collections::{BTreeMap, VecDeque};

use numcore::{DType, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut, ops::Spec};

use super::boundary::{Boundaries, Boundary};
use crate::{
    comm::{Collectives, Comm, Work},
    pipeline::{Action, Direction, End, Message, StagePlacement},
};

/// The number of messages from each rank that are posted before their turn. One hides a transfer behind the pass
/// before; more cost memory, and the deadline of a receive runs from its posting.
const AHEAD: usize = 1;

/// The messages of one rank in a run.
pub(super) struct Transfers<R: Runtime> {
    comm: Comm<R>,
    /// The number of messages from each rank that are posted before their turn.
    ahead: usize,
    sends: VecDeque<Work<()>>,
    lines: BTreeMap<usize, ReceiveQueue<R>>,
}

/// The messages that arrive from one rank.
struct ReceiveQueue<R: Runtime> {
    from: usize,
    order: Vec<Message>,
    posted: usize,
    arriving: VecDeque<(Message, Vec<Work<TensorMut<R>>>)>,
}

impl<R: Runtime> Transfers<R> {
    pub(super) fn new(comm: &Comm<R>, row: &[Action], placement: &StagePlacement) -> Self {
        let mut lines: BTreeMap<usize, ReceiveQueue<R>> = BTreeMap::new();
        for action in row {
            let Action::Message(message @ Message { end: End::Recv, .. }) = *action else { continue };
            let Some(from) = message.peer().and_then(|peer| placement.rank_of(peer.stage)) else { continue };
            let line = || ReceiveQueue { from, order: Vec::new(), posted: 0, arriving: VecDeque::new() };
            lines.entry(from).or_insert_with(line).order.push(message);
        }
        let ahead = if comm.guarantees().independent_transfers { AHEAD } else { 0 };
        Transfers { comm: comm.clone(), ahead, sends: VecDeque::new(), lines }
    }

    /// Posts the messages that may arrive first.
    pub(super) fn begin(&mut self, known: &Boundaries) -> Result<()> {
        let comm = &self.comm;
        self.lines.values_mut().try_for_each(|line| line.post_ahead(comm, self.ahead, known))
    }

    /// Sends the specs of a boundary to the receiver, before its first message.
    pub(super) fn send_header(&mut self, boundary: &Boundary, to: usize) -> Result<()> {
        let (rt, words) = (self.comm.runtime(), boundary.to_words());
        let headers =
            [Tensor::from_slice(rt, [1], &[words.len() as i64])?, Tensor::from_slice(rt, [words.len()], &words)?];
        self.send(&headers, to)
    }

    pub(super) fn send(&mut self, tensors: &[Tensor<R>], to: usize) -> Result<()> {
        while self.sends.front().is_some_and(Work::is_done) {
            self.sends.pop_front().map_or(Ok(()), Work::wait)?;
        }
        for tensor in tensors {
            self.sends.push_back(self.comm.send(tensor, to)?);
        }
        Ok(())
    }

    /// Posts a message whose turn it is, unless it was posted before. The first message of an unknown boundary is
    /// preceded by its header. Messages after it are posted ahead.
    pub(super) fn expect(&mut self, message: Message, from: usize, known: &mut Boundaries) -> Result<()> {
        let Some(line) = self.lines.get_mut(&from) else { return Ok(()) };
        let at = line.order.iter().position(|&other| other == message).unwrap_or(0);
        if line.posted <= at {
            let boundary = boundary_of(message);
            if known.get(boundary, message.micro).is_none() {
                known.learn(boundary, message.micro, receive_header(&self.comm, from)?);
            }
        }
        line.post_ahead(&self.comm, at + 1 + self.ahead, known)
    }

    /// Waits for a message that was posted.
    pub(super) fn take(&mut self, message: Message, from: usize) -> Result<Vec<Tensor<R>>> {
        let line = self.lines.get_mut(&from);
        let arrived = line.and_then(|line| {
            let at = line.arriving.iter().position(|(other, _)| *other == message)?;
            line.arriving.remove(at)
        });
        let works = arrived.map_or(Vec::new(), |(_, works)| works);
        works.into_iter().map(|work| work.wait()?.freeze()).collect()
    }

    /// Waits until everything sent has been received.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.sends.drain(..).try_for_each(Work::wait)
    }
}

impl<R: Runtime> ReceiveQueue<R> {
    /// Posts messages up to number `end`, or to the first with an unknown boundary.
    fn post_ahead(&mut self, comm: &Comm<R>, end: usize, known: &Boundaries) -> Result<()> {
        while self.posted < end.min(self.order.len()) {
            let message = self.order[self.posted];
            let Some(boundary) = known.get(boundary_of(message), message.micro) else { return Ok(()) };
            let specs = match message.direction {
                Direction::Forward => boundary.values(),
                Direction::Backward => boundary.gradients(),
            };
            let works = specs.into_iter().map(|spec| receive(comm, spec, self.from)).collect::<Result<_>>()?;
            self.arriving.push_back((message, works));
            self.posted += 1;
        }
        Ok(())
    }
}

/// The boundary that a message crosses, numbered by the earlier of its two stages.
fn boundary_of(message: Message) -> usize {
    message.peer().map_or(message.stage, |peer| peer.stage.min(message.stage))
}

fn receive<R: Runtime>(comm: &Comm<R>, Spec { shape, dtype }: Spec, from: usize) -> Result<Work<TensorMut<R>>> {
    comm.recv(TensorMut::alloc(comm.runtime(), shape, dtype)?, from)
}

fn receive_header<R: Runtime>(comm: &Comm<R>, from: usize) -> Result<Boundary> {
    let words = |count: usize| -> Result<Vec<i64>> {
        let memory = TensorMut::alloc(
            &comm.runtime().with_category(MemoryCategory::Communication),
            Shape::new(&[count])?,
            DType::I64,
        )?;
        comm.recv(memory, from)?.wait()?.freeze()?.to_vec::<i64>()
    };
    let count = words(1)?.first().copied().and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    Boundary::from_words(&words(count)?)
}
