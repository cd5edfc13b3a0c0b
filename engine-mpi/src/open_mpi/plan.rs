//! What a rank sends and receives in a collective, and what it computes between: data, without memory.
//!
//! Reductions are a reduce-scatter by direct exchange, in which a part is combined in the order of ranks by the rank it belongs to, and an
//! all-gather. They go in chunks, so that one is combined while the next arrives, and what is received aside stays small.

use comm::{Collective, ReduceOp, engine::cuts};

/// Where bytes lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A piece of the output.
    Piece(usize),
    /// Elements of the input.
    Input { start: usize, len: usize },
    /// Memory of the chunk's own.
    Scratch(usize),
}

/// What is done when everything of a phase has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Nothing,
    /// `ins`, in order, into a piece, which may be one of them.
    Combine {
        op: ReduceOp,
        ins: Vec<Place>,
        out: usize,
    },
    Copy {
        from: Place,
        to: usize,
    },
}

/// Transfers with other ranks of the group, all under way at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Phase {
    pub(crate) sends: Vec<(usize, Place)>,
    pub(crate) receives: Vec<(usize, Place)>,
    pub(crate) then: Then,
}

/// Phases one after another; chunks are independent of each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) index: usize,
    pub(crate) phases: Vec<Phase>,
    /// Elements of each piece of its own memory.
    pub(crate) scratch: Vec<usize>,
}

/// A rank's part of a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// How the output is cut, if there is one that something is done with.
    pub(crate) pieces: Vec<usize>,
    pub(crate) chunks: Vec<Chunk>,
}

/// A call without its memory, on rank `rank` of `n`.
#[derive(Clone, Debug)]
pub(crate) struct Shape<'a> {
    pub(crate) what: Collective,
    pub(crate) rank: usize,
    pub(crate) n: usize,
    pub(crate) send: &'a [usize],
    pub(crate) recv: &'a [usize],
    pub(crate) has_input: bool,
    /// Elements of a chunk of a part.
    pub(crate) chunk: usize,
}

impl Plan {
    pub(crate) fn of(call: &Shape<'_>) -> Plan {
        if call.n == 1 && !call.has_input {
            // In place, a group of one has what it would get.
            return Plan { pieces: Vec::new(), chunks: Vec::new() };
        }
        match call.what {
            Collective::AllReduce(op) => call.reduce_parts(op, &cuts(call.send[0], call.n), true),
            Collective::ReduceScatter(op) if call.has_input => call.reduce_input(op),
            Collective::ReduceScatter(op) => call.reduce_parts(op, call.send, false),
            Collective::Reduce { op, root } => call.reduce_to(op, root),
            Collective::AllGather => call.all_gather(),
            Collective::Broadcast { root } => call.broadcast(root),
            Collective::AllToAll => call.all_to_all(),
            Collective::Send { to } => call.one(Vec::new(), vec![(to, call.input())], Vec::new(), Then::Nothing),
            Collective::Recv { from } => {
                call.one(vec![call.recv[0]], Vec::new(), vec![(from, Place::Piece(0))], Then::Nothing)
            }
            Collective::Barrier => Plan { pieces: Vec::new(), chunks: Vec::new() },
        }
    }
}

impl Shape<'_> {
    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.n).filter(|&r| r != self.rank)
    }

    fn input(&self) -> Place {
        Place::Input { start: 0, len: self.send[0] }
    }

    fn one(&self, pieces: Vec<usize>, sends: Vec<(usize, Place)>, receives: Vec<(usize, Place)>, then: Then) -> Plan {
        let phases = vec![Phase { sends, receives, then }];
        Plan { pieces, chunks: vec![Chunk { index: 0, phases, scratch: Vec::new() }] }
    }

    /// Each part is combined by its rank in place; then, if `spread`, all ranks get it.
    fn reduce_parts(&self, op: ReduceOp, parts: &[usize], spread: bool) -> Plan {
        let count = parts.iter().map(|p| p.div_ceil(self.chunk)).max().unwrap_or(0);
        let len = |part: usize, k: usize| self.chunk.min(parts[part].saturating_sub(k * self.chunk));
        let at = |part: usize, k: usize| part * count + k;
        let chunk = |k: usize| {
            let own = at(self.rank, k);
            let (scratch, ins) = self.aside(len(self.rank, k), Place::Piece(own));
            let mut phases = vec![Phase {
                sends: self.others().map(|r| (r, Place::Piece(at(r, k)))).collect(),
                receives: self.others().enumerate().map(|(s, r)| (r, Place::Scratch(s))).collect(),
                then: Then::Combine { op, ins, out: own },
            }];
            if spread {
                phases.push(Phase {
                    sends: self.others().map(|r| (r, Place::Piece(own))).collect(),
                    receives: self.others().map(|r| (r, Place::Piece(at(r, k)))).collect(),
                    then: Then::Nothing,
                });
            }
            Chunk { index: k, phases, scratch }
        };
        let pieces = (0..self.n).flat_map(|part| (0..count).map(move |k| len(part, k))).collect();
        Plan { pieces, chunks: (0..count).map(chunk).collect() }
    }

    /// Memory for what `len` elements of every other rank are received in, and all ranks' in their order.
    fn aside(&self, len: usize, own: Place) -> (Vec<usize>, Vec<Place>) {
        let mut ins: Vec<Place> = (0..self.n - 1).map(Place::Scratch).collect();
        ins.insert(self.rank, own);
        (vec![len; self.n - 1], ins)
    }

    fn reduce_input(&self, op: ReduceOp) -> Plan {
        let count = self.send.iter().map(|p| p.div_ceil(self.chunk)).max().unwrap_or(0);
        let start: Vec<usize> = (0..self.n).map(|r| self.send[..r].iter().sum()).collect();
        let part = |r: usize, k: usize| {
            let begin = (k * self.chunk).min(self.send[r]);
            Place::Input { start: start[r] + begin, len: self.chunk.min(self.send[r] - begin) }
        };
        let len = |k: usize| self.chunk.min(self.send[self.rank].saturating_sub(k * self.chunk));
        let chunk = |k: usize| {
            let (scratch, ins) = self.aside(len(k), part(self.rank, k));
            let phase = Phase {
                sends: self.others().map(|r| (r, part(r, k))).collect(),
                receives: self.others().enumerate().map(|(s, r)| (r, Place::Scratch(s))).collect(),
                then: Then::Combine { op, ins, out: k },
            };
            Chunk { index: k, phases: vec![phase], scratch }
        };
        Plan { pieces: (0..count).map(len).collect(), chunks: (0..count).map(chunk).collect() }
    }

    fn reduce_to(&self, op: ReduceOp, root: usize) -> Plan {
        let count = self.send[0].div_ceil(self.chunk);
        let len = |k: usize| self.chunk.min(self.send[0] - k * self.chunk);
        let chunk = |k: usize| {
            if self.rank != root {
                let phase = Phase { sends: vec![(root, Place::Piece(k))], receives: Vec::new(), then: Then::Nothing };
                return Chunk { index: k, phases: vec![phase], scratch: Vec::new() };
            }
            let (scratch, ins) = self.aside(len(k), Place::Piece(k));
            let receives = self.others().enumerate().map(|(s, r)| (r, Place::Scratch(s))).collect();
            let phase = Phase { sends: Vec::new(), receives, then: Then::Combine { op, ins, out: k } };
            Chunk { index: k, phases: vec![phase], scratch }
        };
        Plan { pieces: (0..count).map(len).collect(), chunks: (0..count).map(chunk).collect() }
    }

    fn all_gather(&self) -> Plan {
        let own = if self.has_input { self.input() } else { Place::Piece(self.rank) };
        let sends = self.others().map(|r| (r, own.clone())).collect();
        let receives = self.others().map(|r| (r, Place::Piece(r))).collect();
        let then = if self.has_input { Then::Copy { from: own, to: self.rank } } else { Then::Nothing };
        self.one(self.recv.to_vec(), sends, receives, then)
    }

    fn broadcast(&self, root: usize) -> Plan {
        let piece = |r| (r, Place::Piece(0));
        let (sends, receives) = match self.rank == root {
            true => (self.others().map(piece).collect(), Vec::new()),
            false => (Vec::new(), vec![piece(root)]),
        };
        self.one(vec![self.send[0]], sends, receives, Then::Nothing)
    }

    fn all_to_all(&self) -> Plan {
        let part = |r: usize| Place::Input { start: self.send[..r].iter().sum(), len: self.send[r] };
        let sends = self.others().map(|r| (r, part(r))).collect();
        let receives = self.others().map(|r| (r, Place::Piece(r))).collect();
        self.one(self.recv.to_vec(), sends, receives, Then::Copy { from: part(self.rank), to: self.rank })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a rank sends to another is what that one receives from it, chunk by chunk and phase by phase.
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
            Plan::of(&Shape { what, rank, n, send: &send, recv: &recv, has_input, chunk: 20 })
        };
        let plans: Vec<Plan> = (0..n).map(plan).collect();
        let mut sent = Vec::new();
        let mut received = Vec::new();
        for (rank, plan) in plans.iter().enumerate() {
            for chunk in &plan.chunks {
                let len = |place: &Place| match place {
                    Place::Piece(k) => plan.pieces[*k],
                    Place::Input { len, .. } => *len,
                    Place::Scratch(k) => chunk.scratch[*k],
                };
                for (p, phase) in chunk.phases.iter().enumerate() {
                    sent.extend(phase.sends.iter().map(|(to, x)| (rank, *to, chunk.index, p, len(x))));
                    received.extend(phase.receives.iter().map(|(from, x)| (*from, rank, chunk.index, p, len(x))));
                }
            }
        }
        // A rank whose own part is shorter has fewer chunks to combine, yet all send and receive the same; empty ones are not sent.
        sent.retain(|t| t.4 > 0);
        received.retain(|t| t.4 > 0);
        sent.sort_unstable();
        received.sort_unstable();
        assert_eq!(sent, received, "{what:?} on {n}");
    }
}
