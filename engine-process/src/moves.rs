//! A collective in flight: a transfer plan and the memory it runs on.

use std::{collections::VecDeque, mem, sync::Arc};

use comm::{
    Call, Collective,
    engine::{CallShape, Combiner, Failure, FailureReason, TransferChunk, TransferPhase, TransferPlan},
};
use numcore::{DType, Error, Result, Runtime, Tensor, TensorMut};
use parking_lot::Mutex;

use super::{
    job::{Advance, CallHeaders, Job, JobError, Slot},
    memory::{CallMemory, Piece, Source},
    message::Header,
    transport::{Channel, Request, Test, Transport},
};

/// The number of chunks under way at once: one is combined while others arrive.
const WINDOW: usize = 3;

/// Limits of the sizes of messages and chunks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The most bytes in one message.
    pub(crate) message: usize,
    /// The number of bytes of a chunk of a reduction.
    pub(crate) chunk: usize,
}

/// A result: the memory, and the event after which the caller's queue may use it.
pub(crate) struct Done<R: Runtime> {
    pub(crate) memory: Option<TensorMut<R>>,
    pub(crate) after: R::Event,
}

/// State shared by all calls of a rank in one group.
pub(crate) struct Shared<R: Runtime> {
    pub(crate) combiner: Arc<Mutex<Combiner<R>>>,
    pub(crate) members: Arc<[usize]>,
    pub(crate) rank: usize,
    pub(crate) limits: Limits,
}

/// A call with its plan, its memory and its transfers under way.
pub(crate) struct Moves<R: Runtime> {
    of: Shared<R>,
    what: Collective,
    dtype: DType,
    ready: R::Event,
    send: Vec<usize>,
    recv: Vec<usize>,
    given: (Option<Tensor<R>>, Option<TensorMut<R>>),
    /// The lengths of the pieces that the output is cut into, in elements.
    pieces: Vec<usize>,
    waiting: VecDeque<TransferChunk>,
    chunks: usize,
    active: Vec<Active<R>>,
    memory: CallMemory<R>,
    tags: Vec<(u32, u32)>,
    slot: Arc<Slot<Done<R>>>,
}

/// A chunk with transfers under way.
struct Active<R: Runtime> {
    chunk: TransferChunk,
    phase: usize,
    requests: Vec<Transfer>,
    scratch: Vec<Piece<R>>,
}

/// A message under way in the transport.
struct Transfer {
    /// The other rank of the group.
    rank: usize,
    request: Request,
    /// The number of bytes due, for a message that is received.
    expected: Option<usize>,
}

/// The progress of a chunk.
#[derive(Clone, Copy, PartialEq)]
enum ChunkState {
    Waiting,
    /// Some of its transfers have ended.
    Moved,
    Over,
}

impl<R: Runtime> Moves<R> {
    pub(crate) fn new(of: Shared<R>, call: Call<R>, ready: R::Event, slot: Arc<Slot<Done<R>>>) -> Self {
        let (what, dtype) = (call.what(), call.dtype());
        let (send, recv) = (call.send_parts().to_vec(), call.recv_parts().to_vec());
        let header = call.is_header();
        let given = call.into_memory();
        let chunk = (of.limits.chunk / dtype.size()).max(1);
        let (rank, n) = (of.rank, of.members.len());
        let shape = CallShape { what, rank, n, send: &send, recv: &recv, has_input: given.0.is_some(), chunk };
        let plan = if header { TransferPlan::empty() } else { TransferPlan::of(&shape) };
        let chunks = plan.chunks.len();
        let memory = CallMemory { input: None, pieces: Vec::new() };
        Moves {
            of,
            what,
            dtype,
            ready,
            send,
            recv,
            given,
            pieces: plan.pieces,
            waiting: plan.chunks.into(),
            chunks,
            active: Vec::new(),
            memory,
            tags: Vec::new(),
            slot,
        }
    }

    fn activate(&mut self, transport: &mut dyn Transport) -> Result<bool, JobError> {
        let mut moved = false;
        while self.active.len() < WINDOW {
            let Some(chunk) = self.waiting.pop_front() else { break };
            let rt = self.of.combiner.lock().runtime().clone();
            let scratch = chunk.scratch.iter().map(|&len| Piece::scratch(&rt, len, self.dtype));
            let scratch = scratch.collect::<Result<_>>().map_err(other)?;
            let mut active = Active { chunk, phase: 0, requests: Vec::new(), scratch };
            // The chunk is kept even if posting fails: transfers posted before the failure may be under way.
            let posted = self.post(transport, &mut active);
            self.active.push(active);
            posted?;
            moved = true;
        }
        Ok(moved)
    }

    /// Starts the transfers of a chunk's phase.
    fn post(&mut self, transport: &mut dyn Transport, active: &mut Active<R>) -> Result<(), JobError> {
        // Below `tags`, of which this call has as many, and as each header was checked to have.
        let step = (2 * active.chunk.index + active.phase) as u32;
        let Some(TransferPhase { sends, receives, .. }) = active.chunk.phases.get(active.phase) else { return Ok(()) };
        for (from, place) in receives {
            let (start, bytes) = self.memory.receive_span(place, &mut active.scratch);
            for (at, length) in pieces(bytes, self.of.limits.message) {
                // SAFETY: the bytes are part of a piece that this call owns, and nothing else uses them until the phase
                // has ended. If the phase never ends, the call leaks the piece (`fail`, `drop`).
                let request = unsafe {
                    transport.receive(
                        Channel::Data,
                        start.add(at),
                        length,
                        self.of.members[*from],
                        self.tags[*from].1 + step,
                    )
                };
                let request = request.map_err(other)?;
                active.requests.push(Transfer { rank: *from, request, expected: Some(length) });
            }
        }
        for (to, place) in sends {
            let (start, bytes) = self.memory.send_span(place);
            for (at, length) in pieces(bytes, self.of.limits.message) {
                // SAFETY: as above; no phase sends from memory that it receives into.
                let request = unsafe {
                    transport.send(Channel::Data, start.add(at), length, self.of.members[*to], self.tags[*to].0 + step)
                };
                let request = request.map_err(other)?;
                active.requests.push(Transfer { rank: *to, request, expected: None });
            }
        }
        Ok(())
    }

    /// Tests the transfers of a chunk. After the last of a phase, runs the end of the phase and posts the next one.
    fn advance_chunk(&mut self, transport: &mut dyn Transport, active: &mut Active<R>) -> Result<ChunkState, JobError> {
        let before = active.requests.len();
        if !drain(transport, &mut active.requests)? {
            return Ok(if active.requests.len() < before { ChunkState::Moved } else { ChunkState::Waiting });
        }
        self.end_phase(active).map_err(other)?;
        active.phase += 1;
        if active.phase >= active.chunk.phases.len() {
            return Ok(ChunkState::Over);
        }
        self.post(transport, active)?;
        Ok(ChunkState::Moved)
    }

    /// Stores the received bytes of a phase and combines them, as the plan says.
    fn end_phase(&mut self, active: &mut Active<R>) -> Result<()> {
        let combiner = self.of.combiner.clone();
        let mut combiner = combiner.lock();
        let Some(phase) = active.chunk.phases.get(active.phase) else { return Ok(()) };
        for (_, place) in &phase.receives {
            self.memory.received(place, &mut active.scratch, &mut combiner)?;
        }
        let Some(out) = phase.end.out() else { return Ok(()) };
        let CallMemory { input, pieces } = &mut self.memory;
        let scratch: Vec<&TensorMut<R>> = active.scratch.iter().map(|piece| &piece.memory).collect();
        phase.end.run(&mut combiner, input.as_ref().map(Source::row), &scratch, &mut pieces[out].memory)?;
        pieces[out].load()
    }

    fn result(&mut self) -> Result<Done<R>> {
        let pieces = mem::take(&mut self.memory.pieces);
        let memory = match self.given.1.take() {
            Some(untouched) => Some(untouched),
            None if pieces.is_empty() => None,
            None => Some(TensorMut::join(pieces.into_iter().map(|piece| piece.memory).collect())?),
        };
        Ok(Done { memory, after: self.of.combiner.lock().runtime().record()? })
    }
}

impl<R: Runtime> Job for Moves<R> {
    fn tags(&self) -> u32 {
        // More than there are: such a call is refused.
        u32::try_from(2 * self.chunks).unwrap_or(u32::MAX)
    }

    fn elements_for(&self, rank: usize) -> usize {
        if self.what == Collective::AllToAll { self.send[rank] } else { 0 }
    }

    fn check(&self, from: usize, header: &Header) -> Option<String> {
        let (sent, wanted) = match self.what {
            Collective::AllToAll => (header.elements, self.recv[from]),
            _ => return None,
        };
        let (from, to) = (self.of.members[from], self.of.members[self.of.rank]);
        (sent != wanted).then(|| format!("rank {from} sends {sent} elements to rank {to}, which expects {wanted}"))
    }

    fn begin(&mut self, headers: CallHeaders) -> Result<()> {
        self.tags = headers.tags;
        self.of.combiner.lock().runtime().wait(&self.ready)?;
        self.memory.input = self.given.0.take().map(Source::new).transpose()?;
        if self.waiting.is_empty() {
            return Ok(());
        }
        if let Some(output) = self.given.1.take() {
            let pieces = output.split(&self.pieces)?;
            self.memory.pieces = pieces.into_iter().map(Piece::new).collect::<Result<_>>()?;
        }
        Ok(())
    }

    fn advance(&mut self, transport: &mut dyn Transport) -> Result<Advance, JobError> {
        let mut moved = self.activate(transport)?;
        let mut error = None;
        for mut active in mem::take(&mut self.active) {
            // After an error, the other chunks stay as they are: the transport may still use their memory.
            let state =
                if error.is_none() { self.advance_chunk(transport, &mut active) } else { Ok(ChunkState::Waiting) };
            moved |= matches!(state, Ok(ChunkState::Moved | ChunkState::Over));
            if !matches!(state, Ok(ChunkState::Over)) {
                self.active.push(active);
            }
            error = error.or(state.err());
        }
        error.map_or(Ok(()), Err)?;
        self.activate(transport)?;
        Ok(match (self.active.is_empty() && self.waiting.is_empty(), moved) {
            (true, _) => Advance::Done,
            (false, true) => Advance::Moved,
            (false, false) => Advance::Waiting,
        })
    }

    fn waits_for(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> =
            self.active.iter().flat_map(|a| a.requests.iter().map(|transfer| transfer.rank)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn is_waited_for(&self) -> bool {
        self.slot.is_waited_for()
    }

    fn finish(mut self: Box<Self>) -> Result<(), Failure> {
        let peer = self.of.members[self.of.rank];
        let done = self.result();
        self.memory.input = None;
        let failed =
            |e: Error| Failure { reason: FailureReason::Peer { peer, cause: e.to_string() }, calls: String::new() };
        match done.map_err(failed) {
            Ok(done) => {
                self.slot.fill(Ok(done));
                Ok(())
            }
            Err(failure) => {
                self.slot.fill(Err(failure.clone()));
                Err(failure)
            }
        }
    }

    fn fail(mut self: Box<Self>, failure: Failure) {
        let slot = mem::replace(&mut self.slot, Slot::new(self.of.members[self.of.rank]));
        // Memory without transfers under way is freed before the caller learns of the failure.
        drop(self);
        slot.fill(Err(failure));
    }
}

impl<R: Runtime> Drop for Moves<R> {
    /// Leaks the memory of unfinished transfers, since the transport may still read or write it.
    fn drop(&mut self) {
        if self.active.iter().any(|active| !active.requests.is_empty()) {
            mem::forget(mem::take(&mut self.active));
            mem::forget(mem::take(&mut self.memory.pieces));
            mem::forget(self.memory.input.take());
        }
        self.slot.end();
    }
}

/// Tests all transfers and removes those that have ended. Returns true if none is left.
fn drain(transport: &mut dyn Transport, requests: &mut Vec<Transfer>) -> Result<bool, JobError> {
    let mut error = None;
    requests.retain_mut(|Transfer { rank, request, expected }| {
        match transport.test(request) {
            Test::Pending => return true,
            Test::Done(bytes) => {
                if let Some(expected) = expected.filter(|&expected| expected != bytes) {
                    let why = format!(
                        "a message of {bytes} bytes came from rank {rank} of the group where {expected} were due: all processes must have \
                         equal `Processes::chunk` and `Processes::message_limit`"
                    );
                    error = Some(JobError::Other(why));
                }
            }
            Test::Dead => error = Some(JobError::Dead(*rank)),
            Test::Failed(words) => error = Some(JobError::Other(format!("{}: {words}", transport.name()))),
        }
        false
    });
    error.map_or(Ok(requests.is_empty()), Err)
}

/// Consecutive pieces of at most `limit` bytes, as (offset, length).
fn pieces(bytes: usize, limit: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes.div_ceil(limit)).map(move |k| (k * limit, limit.min(bytes - k * limit)))
}

fn other(error: Error) -> JobError {
    JobError::Other(error.to_string())
}
