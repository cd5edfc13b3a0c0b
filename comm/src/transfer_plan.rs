//! The transfers of a rank in a collective, and the computations between them: data, without memory.
//!
//! Reductions are a reduce-scatter by direct exchange, in which a part is combined in rank order by the rank it belongs
//! to, and an all-gather. They go in chunks, so that one is combined while the next arrives, and receive buffers stay
//! small.

use numcore::{Result, Runtime, Tensor, TensorMut, ops::Input, ops::ViewOps};

use super::{
    Collective, ReduceOp,
    combine::{Combiner, cuts},
};

/// The memory of a call that elements are sent from, received into or combined in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferMemory {
    /// A piece of the output.
    Piece(usize),
    /// Elements of the input.
    Input {
        /// The first element.
        start: usize,
        /// The number of elements.
        len: usize,
    },
    /// A piece of the memory that an engine allocates for a chunk.
    Scratch(usize),
}

/// The computation at the end of a phase, when all of its data has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PhaseEnd {
    /// No computation.
    Nothing,
    /// Values are combined into a piece of the output.
    Combine {
        /// The reduction.
        op: ReduceOp,
        /// The values, in the order of ranks; `out` may be one of them.
        ins: Vec<TransferMemory>,
        /// The piece of the output.
        out: usize,
    },
    /// This rank's part of its own input is copied into a piece of the output.
    Copy {
        /// The source, in the input.
        from: TransferMemory,
        /// The piece of the output.
        to: usize,
    },
}

/// Transfers with other ranks of the group, all under way at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPhase {
    /// Destination ranks and the memory to send. Empty ones are not sent.
    pub sends: Vec<(usize, TransferMemory)>,
    /// Source ranks and the memory to receive into. Empty ones are not received.
    pub receives: Vec<(usize, TransferMemory)>,
    /// The computation that follows.
    pub end: PhaseEnd,
}

/// Phases one after another; chunks are independent of each other, and all ranks have equal numbers of both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferChunk {
    /// The number of the chunk in its plan.
    pub index: usize,
    /// The transfers, one phase after another.
    pub phases: Vec<TransferPhase>,
    /// Elements of each piece of scratch memory, beside input and output.
    pub scratch: Vec<usize>,
}

/// One rank's part of a collective as transfers between two ranks: data, without memory.
///
/// Reductions are a reduce-scatter by direct exchange, in which a part is combined in rank order by the rank it belongs
/// to, and an all-gather. Sums have equal bits on every engine that follows the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPlan {
    /// The lengths of the output's pieces, if the plan uses an output.
    pub pieces: Vec<usize>,
    /// The transfers, by chunk.
    pub chunks: Vec<TransferChunk>,
}

/// A call without its memory, on rank `rank` of `n`.
#[derive(Clone, Debug)]
pub struct CallShape<'a> {
    /// The kind of collective.
    pub what: Collective,
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub n: usize,
    /// The elements of [`Call::send_parts`](crate::Call::send_parts).
    pub send: &'a [usize],
    /// The elements of [`Call::recv_parts`](crate::Call::recv_parts).
    pub recv: &'a [usize],
    /// True if the call has an input, which is only read.
    pub has_input: bool,
    /// The largest number of elements of a rank's part in one chunk of a reduction.
    pub chunk: usize,
}

impl PhaseEnd {
    /// The piece of the output that is written, if one is.
    pub fn out(&self) -> Option<usize> {
        match *self {
            PhaseEnd::Nothing => None,
            PhaseEnd::Combine { out, .. } => Some(out),
            PhaseEnd::Copy { to, .. } => Some(to),
        }
    }

    /// Runs the computation on the combiner's queue: `out` is the piece that is written, `input` and `scratch` are
    /// read.
    pub fn run<R: Runtime>(
        &self,
        combiner: &mut Combiner<R>,
        input: Option<&Tensor<R>>,
        scratch: &[&TensorMut<R>],
        out: &mut TensorMut<R>,
    ) -> Result<()> {
        if out.shape().numel() == 0 {
            return Ok(());
        }
        let part = |memory: &TransferMemory| match (memory, input) {
            (TransferMemory::Input { start, len }, Some(input)) => input.narrow(0, *start, *len).map(Some),
            _ => Ok(None),
        };
        match self {
            PhaseEnd::Nothing => Ok(()),
            PhaseEnd::Copy { from, .. } => match part(from)? {
                Some(from) => combiner.copy(Input::Value(&from), &mut [out]),
                None => Ok(()),
            },
            PhaseEnd::Combine { op, ins, .. } => {
                let parts = ins.iter().map(part).collect::<Result<Vec<_>>>()?;
                let operand = |(memory, part): (&TransferMemory, &'_ Option<Tensor<R>>)| match (memory, part) {
                    (TransferMemory::Scratch(k), _) => Some(*k),
                    _ => None,
                };
                let scratch_of: Vec<Option<usize>> = ins.iter().zip(&parts).map(operand).collect();
                let operands: Vec<Input<'_, R>> = scratch_of
                    .iter()
                    .zip(&parts)
                    .map(|(of, part)| match (of, part) {
                        (Some(k), _) => Input::Memory(scratch[*k]),
                        (None, Some(part)) => Input::Value(part),
                        (None, None) => Input::Own(0),
                    })
                    .collect();
                combiner.reduce(*op, &operands, &mut [out])
            }
        }
    }
}

impl TransferPlan {
    /// The plan without transfers.
    pub fn empty() -> TransferPlan {
        TransferPlan { pieces: Vec::new(), chunks: Vec::new() }
    }

    /// The plan of this call's rank.
    pub fn of(call: &CallShape<'_>) -> TransferPlan {
        if call.n == 1 && !call.has_input {
            // In place, a group of one already has its result.
            return TransferPlan::empty();
        }
        match call.what {
            Collective::AllReduce(op) => call.reduce_parts(op, &cuts(call.send[0], call.n), true),
            Collective::ReduceScatter(op) if call.has_input => call.reduce_input(op),
            Collective::ReduceScatter(op) => call.reduce_parts(op, call.send, false),
            Collective::Reduce { op, root } => call.reduce_to(op, root),
            Collective::AllGather => call.all_gather(),
            Collective::Broadcast { root } => call.broadcast(root),
            Collective::AllToAll => call.all_to_all(),
            Collective::Send { to } => call.one(Vec::new(), vec![(to, call.input())], Vec::new(), PhaseEnd::Nothing),
            Collective::Recv { from } => {
                call.one(vec![call.recv[0]], Vec::new(), vec![(from, TransferMemory::Piece(0))], PhaseEnd::Nothing)
            }
            Collective::Barrier => TransferPlan::empty(),
        }
    }
}

impl CallShape<'_> {
    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.n).filter(|&r| r != self.rank)
    }

    fn input(&self) -> TransferMemory {
        TransferMemory::Input { start: 0, len: self.send[0] }
    }

    fn one(
        &self,
        pieces: Vec<usize>,
        sends: Vec<(usize, TransferMemory)>,
        receives: Vec<(usize, TransferMemory)>,
        end: PhaseEnd,
    ) -> TransferPlan {
        let phases = vec![TransferPhase { sends, receives, end }];
        TransferPlan { pieces, chunks: vec![TransferChunk { index: 0, phases, scratch: Vec::new() }] }
    }

    /// Combines each part in place on its rank; then, if `spread`, sends it to all ranks.
    fn reduce_parts(&self, op: ReduceOp, parts: &[usize], spread: bool) -> TransferPlan {
        let count = parts.iter().map(|p| p.div_ceil(self.chunk)).max().unwrap_or(0);
        let len = |part: usize, k: usize| self.chunk.min(parts[part].saturating_sub(k * self.chunk));
        let at = |part: usize, k: usize| part * count + k;
        let chunk = |k: usize| {
            let own = at(self.rank, k);
            let (scratch, ins) = self.scratch_for(len(self.rank, k), TransferMemory::Piece(own));
            let mut phases = vec![TransferPhase {
                sends: self.others().map(|r| (r, TransferMemory::Piece(at(r, k)))).collect(),
                receives: self.others().enumerate().map(|(s, r)| (r, TransferMemory::Scratch(s))).collect(),
                end: PhaseEnd::Combine { op, ins, out: own },
            }];
            if spread {
                phases.push(TransferPhase {
                    sends: self.others().map(|r| (r, TransferMemory::Piece(own))).collect(),
                    receives: self.others().map(|r| (r, TransferMemory::Piece(at(r, k)))).collect(),
                    end: PhaseEnd::Nothing,
                });
            }
            TransferChunk { index: k, phases, scratch }
        };
        let pieces = (0..self.n).flat_map(|part| (0..count).map(move |k| len(part, k))).collect();
        TransferPlan { pieces, chunks: (0..count).map(chunk).collect() }
    }

    /// The lengths of scratch memory for `len` elements of every other rank, and the operands of all ranks in their
    /// order.
    fn scratch_for(&self, len: usize, own: TransferMemory) -> (Vec<usize>, Vec<TransferMemory>) {
        let mut ins: Vec<TransferMemory> = (0..self.n - 1).map(TransferMemory::Scratch).collect();
        ins.insert(self.rank, own);
        (vec![len; self.n - 1], ins)
    }

    fn reduce_input(&self, op: ReduceOp) -> TransferPlan {
        let count = self.send.iter().map(|p| p.div_ceil(self.chunk)).max().unwrap_or(0);
        let start: Vec<usize> = (0..self.n).map(|r| self.send[..r].iter().sum()).collect();
        let part = |r: usize, k: usize| {
            let begin = (k * self.chunk).min(self.send[r]);
            TransferMemory::Input { start: start[r] + begin, len: self.chunk.min(self.send[r] - begin) }
        };
        let len = |k: usize| self.chunk.min(self.send[self.rank].saturating_sub(k * self.chunk));
        let chunk = |k: usize| {
            let (scratch, ins) = self.scratch_for(len(k), part(self.rank, k));
            let phase = TransferPhase {
                sends: self.others().map(|r| (r, part(r, k))).collect(),
                receives: self.others().enumerate().map(|(s, r)| (r, TransferMemory::Scratch(s))).collect(),
                end: PhaseEnd::Combine { op, ins, out: k },
            };
            TransferChunk { index: k, phases: vec![phase], scratch }
        };
        TransferPlan { pieces: (0..count).map(len).collect(), chunks: (0..count).map(chunk).collect() }
    }

    fn reduce_to(&self, op: ReduceOp, root: usize) -> TransferPlan {
        let count = self.send[0].div_ceil(self.chunk);
        let len = |k: usize| self.chunk.min(self.send[0] - k * self.chunk);
        let chunk = |k: usize| {
            if self.rank != root {
                let phase = TransferPhase {
                    sends: vec![(root, TransferMemory::Piece(k))],
                    receives: Vec::new(),
                    end: PhaseEnd::Nothing,
                };
                return TransferChunk { index: k, phases: vec![phase], scratch: Vec::new() };
            }
            let (scratch, ins) = self.scratch_for(len(k), TransferMemory::Piece(k));
            let receives = self.others().enumerate().map(|(s, r)| (r, TransferMemory::Scratch(s))).collect();
            let phase = TransferPhase { sends: Vec::new(), receives, end: PhaseEnd::Combine { op, ins, out: k } };
            TransferChunk { index: k, phases: vec![phase], scratch }
        };
        TransferPlan { pieces: (0..count).map(len).collect(), chunks: (0..count).map(chunk).collect() }
    }

    fn all_gather(&self) -> TransferPlan {
        let own = if self.has_input { self.input() } else { TransferMemory::Piece(self.rank) };
        let sends = self.others().map(|r| (r, own.clone())).collect();
        let receives = self.others().map(|r| (r, TransferMemory::Piece(r))).collect();
        let end = if self.has_input { PhaseEnd::Copy { from: own, to: self.rank } } else { PhaseEnd::Nothing };
        self.one(self.recv.to_vec(), sends, receives, end)
    }

    fn broadcast(&self, root: usize) -> TransferPlan {
        let piece = |r| (r, TransferMemory::Piece(0));
        let (sends, receives) = match self.rank == root {
            true => (self.others().map(piece).collect(), Vec::new()),
            false => (Vec::new(), vec![piece(root)]),
        };
        self.one(vec![self.send[0]], sends, receives, PhaseEnd::Nothing)
    }

    fn all_to_all(&self) -> TransferPlan {
        let part = |r: usize| TransferMemory::Input { start: self.send[..r].iter().sum(), len: self.send[r] };
        let sends = self.others().map(|r| (r, part(r))).collect();
        let receives = self.others().map(|r| (r, TransferMemory::Piece(r))).collect();
        self.one(self.recv.to_vec(), sends, receives, PhaseEnd::Copy { from: part(self.rank), to: self.rank })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that each send to a rank matches that rank's receive, chunk by chunk and phase by phase.
    #[test]
    fn sends_and_receives_of_all_ranks_match() {
        for n in 1..6 {
            for (what, has_input) in [
                (Collective::AllReduce(ReduceOp::Sum), false),
                (Collective::ReduceScatter(ReduceOp::Sum), false),
                (Collective::ReduceScatter(ReduceOp::Sum), true),
                (Collective::Reduce { op: ReduceOp::Sum, root: n - 1 }, false),
                (Collective::AllGather, true),
                (Collective::AllGather, false),
                (Collective::Broadcast { root: 0 }, false),
                (Collective::AllToAll, true),
            ] {
                check(what, n, has_input);
            }
        }
    }

    fn check(what: Collective, n: usize, has_input: bool) {
        let parts: Vec<usize> = (0..n).map(|r| r * 37).collect();
        let whole = vec![517];
        let lengths = |rank: usize| match what {
            Collective::ReduceScatter(_) => (parts.clone(), vec![parts[rank]]),
            Collective::AllGather => (vec![parts[rank]], parts.clone()),
            Collective::AllToAll => (vec![5; n], vec![5; n]),
            _ => (whole.clone(), whole.clone()),
        };
        let plan = |rank| {
            let (send, recv) = lengths(rank);
            TransferPlan::of(&CallShape { what, rank, n, send: &send, recv: &recv, has_input, chunk: 20 })
        };
        let plans: Vec<TransferPlan> = (0..n).map(plan).collect();
        if n > 1 && matches!(what, Collective::AllReduce(_)) {
            let covered = |plan: &TransferPlan| plan.pieces.iter().sum::<usize>();
            assert!(plans.iter().all(|plan| covered(plan) == whole[0]), "pieces make the whole, on {n}");
        }
        let mut sent = Vec::new();
        let mut received = Vec::new();
        for (rank, plan) in plans.iter().enumerate() {
            for chunk in &plan.chunks {
                let len = |place: &TransferMemory| match place {
                    TransferMemory::Piece(k) => plan.pieces[*k],
                    TransferMemory::Input { len, .. } => *len,
                    TransferMemory::Scratch(k) => chunk.scratch[*k],
                };
                for (p, phase) in chunk.phases.iter().enumerate() {
                    sent.extend(phase.sends.iter().map(|(to, x)| (rank, *to, chunk.index, p, len(x))));
                    received.extend(phase.receives.iter().map(|(from, x)| (*from, rank, chunk.index, p, len(x))));
                }
            }
        }
        // A rank whose own part is shorter has fewer chunks to combine, yet sends and receives match on all ranks;
        // empty ones are not sent.
        sent.retain(|t| t.4 > 0);
        received.retain(|t| t.4 > 0);
        sent.sort_unstable();
        received.sort_unstable();
        assert_eq!(sent, received, "{what:?} on {n}");
    }
}
