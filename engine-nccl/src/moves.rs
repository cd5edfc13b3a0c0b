//! Queueing a call on the device: transfers between two ranks after a plan, or one native operation of the library.

use std::sync::Arc;

use comm::{
    Call, Collective,
    engine::{CallShape, Combiner, TransferChunk, TransferMemory, TransferPhase, TransferPlan},
};
use numcore::{DType, Error, MemoryCategory, Result, Runtime, Shape, Tensor, TensorMut};

use super::{
    api::{Elements, NcclApi, Operation, RawComm, Status},
    handle::{CallFailure, Handle},
    memory::Addresses,
    world::World,
};

/// The reason that a call could not be queued.
pub(crate) enum QueueError {
    /// The library failed.
    Library(CallFailure),
    /// A runtime failed.
    Error(Error),
}

impl From<Error> for QueueError {
    fn from(error: Error) -> QueueError {
        QueueError::Error(error)
    }
}

/// State needed to queue calls.
pub(crate) struct QueueContext<'a, R: Runtime, H: Runtime> {
    pub(crate) world: &'a World<H>,
    pub(crate) handle: &'a Arc<Handle>,
    pub(crate) combiner: &'a mut Combiner<R>,
    pub(crate) rank: usize,
    pub(crate) n: usize,
    pub(crate) chunk: usize,
    pub(crate) native_sums: bool,
    pub(crate) host: bool,
}

/// The memory of a call whose operations are all queued.
pub(crate) struct CallBuffers<R: Runtime> {
    pub(crate) input: Option<Tensor<R>>,
    pub(crate) output: Option<TensorMut<R>>,
}

/// A call and its memory while it is being queued.
pub(crate) struct Moving<R: Runtime> {
    op: &'static str,
    what: Collective,
    dtype: DType,
    plan: TransferPlan,
    native: bool,
    input: Option<Tensor<R>>,
    output: Option<TensorMut<R>>,
    pieces: Vec<TensorMut<R>>,
}

impl<R: Runtime> Moving<R> {
    /// Plans a call and cuts its output into the pieces of the plan.
    pub(crate) fn of<H: Runtime>(call: Call<R>, by: &QueueContext<'_, R, H>) -> Result<Self> {
        let (what, dtype) = (call.what(), call.dtype());
        let (send, recv) = (call.send_parts().to_vec(), call.recv_parts().to_vec());
        let (input, output) = call.into_memory();
        let chunk = (by.chunk / dtype.size()).max(1);
        let shape =
            CallShape { what, rank: by.rank, n: by.n, send: &send, recv: &recv, has_input: input.is_some(), chunk };
        let native = by.n > 1 && is_native(&shape, by.native_sums);
        let mut own = Moving {
            op: what.name(),
            what,
            dtype,
            plan: TransferPlan::of(&shape),
            native,
            input,
            output: None,
            pieces: Vec::new(),
        };
        if own.native {
            own.plan = TransferPlan { pieces: native_pieces(&shape), chunks: Vec::new() };
        }
        match output {
            // An output without pieces is returned untouched.
            Some(output) if own.plan.pieces.is_empty() => own.output = Some(output),
            Some(output) => own.pieces = output.split(&own.plan.pieces)?,
            None => {}
        }
        Ok(own)
    }

    /// Tells whether the call is a transfer between two ranks.
    pub(crate) fn is_transfer(&self) -> bool {
        self.what.peer().is_some()
    }

    /// Queues all operations of the call.
    pub(crate) fn queue<H: Runtime>(&mut self, by: &mut QueueContext<'_, R, H>) -> Result<(), QueueError> {
        if self.native {
            let operation = self.operation(by)?;
            return by.run(self.op, &operation.into_iter().collect::<Vec<_>>());
        }
        for chunk in std::mem::take(&mut self.plan.chunks) {
            self.queue_chunk(&chunk, by)?;
        }
        Ok(())
    }

    /// The operations of a transfer, to be queued together with those of others.
    pub(crate) fn transfers<H: Runtime>(&mut self, by: &QueueContext<'_, R, H>) -> Result<Vec<Operation>> {
        let mut operations = Vec::new();
        for chunk in std::mem::take(&mut self.plan.chunks) {
            for phase in &chunk.phases {
                operations.extend(self.phase(phase, &mut [], &by.addresses(self.op))?);
            }
        }
        Ok(operations)
    }

    /// Returns the memory, once all operations are queued.
    pub(crate) fn finish(self) -> Result<CallBuffers<R>> {
        let output = match self.output {
            Some(untouched) => Some(untouched),
            None if self.pieces.is_empty() => None,
            None => Some(TensorMut::join(self.pieces)?),
        };
        Ok(CallBuffers { input: self.input, output })
    }

    fn queue_chunk<H: Runtime>(
        &mut self,
        chunk: &TransferChunk,
        by: &mut QueueContext<'_, R, H>,
    ) -> Result<(), QueueError> {
        let rt = by.combiner.runtime().clone();
        let fresh =
            |&len: &usize| TensorMut::alloc_for(&rt, MemoryCategory::Communication, Shape::new(&[len])?, self.dtype);
        // Scratch memory of the queue: its next user is ordered after this chunk.
        let mut scratch = chunk.scratch.iter().map(fresh).collect::<Result<Vec<_>>>()?;
        for phase in &chunk.phases {
            let operations = self.phase(phase, &mut scratch, &by.addresses(self.op))?;
            by.run(self.op, &operations)?;
            if let Some(out) = phase.end.out() {
                let scratch: Vec<&TensorMut<R>> = scratch.iter().collect();
                phase.end.run(by.combiner, self.input.as_ref(), &scratch, &mut self.pieces[out])?;
            }
        }
        Ok(())
    }

    /// The transfers of a phase. On every rank, sends come before receives, and both are in the order of ranks, so the
    /// transfers of two ranks match.
    fn phase(
        &mut self,
        phase: &TransferPhase,
        scratch: &mut [TensorMut<R>],
        addresses: &Addresses<'_, R>,
    ) -> Result<Vec<Operation>> {
        let mut operations = Vec::new();
        for (to, memory) in &phase.sends {
            let (from, bytes) = self.place(memory, scratch, addresses)?;
            operations.push(Operation::Send { from, bytes, to: *to });
        }
        for (from, memory) in &phase.receives {
            let (to, bytes) = self.place(memory, scratch, addresses)?;
            operations.push(Operation::Recv { to, bytes, from: *from });
        }
        // Empty transfers are dropped; the other side drops them too.
        operations.retain(|operation| {
            !matches!(operation, Operation::Send { bytes: 0, .. } | Operation::Recv { bytes: 0, .. })
        });
        Ok(operations)
    }

    /// The address and the bytes of a part of the call's memory.
    fn place(
        &mut self,
        memory: &TransferMemory,
        scratch: &mut [TensorMut<R>],
        addresses: &Addresses<'_, R>,
    ) -> Result<(u64, usize)> {
        let size = self.dtype.size();
        let piece = |memory: &mut TensorMut<R>| Ok((addresses.of_mut(memory)?, memory.shape().numel() * size));
        match (memory, &self.input) {
            (TransferMemory::Piece(k), _) => piece(&mut self.pieces[*k]),
            (TransferMemory::Scratch(k), _) => piece(&mut scratch[*k]),
            (TransferMemory::Input { start, len }, Some(input)) => {
                Ok((addresses.of(input)? + (start * size) as u64, len * size))
            }
            (TransferMemory::Input { .. }, None) => Err(addresses.nothing_to_send()),
        }
    }

    /// The native operation of the library for the call; `None` for memory without elements.
    fn operation<H: Runtime>(&mut self, by: &QueueContext<'_, R, H>) -> Result<Option<Operation>> {
        let addresses = by.addresses(self.op);
        let Some(output) = self.pieces.first_mut() else { return Ok(None) };
        let count = output.shape().numel();
        let (to, bytes) = (addresses.of_mut(output)?, count * self.dtype.size());
        let from = self.input.as_ref().map(|input| addresses.of(input)).transpose()?;
        let of = Elements { count, dtype: self.dtype };
        let operation = match self.what {
            Collective::AllReduce(op) => Operation::AllReduce { at: to, of, op },
            Collective::Reduce { op, root } => Operation::Reduce { at: to, of, op, root },
            Collective::Broadcast { root } => Operation::Broadcast { at: to, bytes, root },
            Collective::ReduceScatter(op) => {
                // In place, the output holds all parts.
                let part = if from.is_some() { count } else { count / by.n };
                let of = Elements { count: part, ..of };
                let own = (by.rank * part * self.dtype.size()) as u64;
                Operation::ReduceScatter {
                    from: from.unwrap_or(to),
                    to: if from.is_some() { to } else { to + own },
                    of,
                    op,
                }
            }
            _ => {
                let bytes = bytes / by.n;
                Operation::AllGather { from: from.unwrap_or(to + (by.rank * bytes) as u64), to, bytes }
            }
        };
        Ok((count > 0).then_some(operation))
    }
}

/// Tells whether the library can run the call natively: parts are even, and sums may be in its order.
fn is_native(call: &CallShape<'_>, native_sums: bool) -> bool {
    let even = |parts: &[usize]| parts.iter().all(|part| *part == parts[0]);
    match call.what {
        Collective::Broadcast { .. } => true,
        Collective::AllGather => even(call.recv),
        Collective::AllReduce(_) | Collective::Reduce { .. } => native_sums,
        Collective::ReduceScatter(_) => native_sums && even(call.send),
        _ => false,
    }
}

/// The lengths of the output of a native call: one piece.
fn native_pieces(call: &CallShape<'_>) -> Vec<usize> {
    match call.what {
        Collective::AllGather => vec![call.recv.iter().sum()],
        Collective::ReduceScatter(_) if call.has_input => vec![call.send[call.rank]],
        _ => vec![call.send.iter().sum()],
    }
}

impl<R: Runtime, H: Runtime> QueueContext<'_, R, H> {
    fn addresses(&self, op: &'static str) -> Addresses<'_, R> {
        Addresses { op, queue: self.combiner.runtime(), host: self.host }
    }

    /// Queues operations as one group, so that they run together.
    pub(crate) fn run(&self, op: &'static str, operations: &[Operation]) -> Result<(), QueueError> {
        if operations.is_empty() {
            return Ok(());
        }
        let (world, stream) = (self.world, self.world.stream());
        let is_over = || world.is_over();
        let started = world.enter(op, || {
            self.handle.run(&world.wait_limit(&is_over), |api, comm| group(api, comm, operations, stream))
        })?;
        started.map_err(QueueError::Library)
    }
}

fn group(api: &dyn NcclApi, comm: RawComm, operations: &[Operation], stream: usize) -> Status {
    let mut status = api.group_start();
    for operation in operations {
        if !matches!(status, Status::SUCCESS | Status::IN_PROGRESS) {
            break;
        }
        // SAFETY: addresses are of memory that the call owns or shares, on the device of this queue, whose runtime has
        // booked the use: it is not reused before the stream has passed. If the call fails, the communicator is aborted
        // before its memory is dropped.
        status = unsafe { api.enqueue(comm, operation, stream) };
    }
    // A group that was begun is always ended, even after an error.
    match (status, api.group_end()) {
        (Status::SUCCESS | Status::IN_PROGRESS, end) => end,
        (failed, _) => failed,
    }
}
