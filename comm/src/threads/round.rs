//! One collective: the ranks that have arrived, and its memory, cut for the workers and joined again.

use std::sync::Arc;

use numcore::{Result, Runtime, Tensor, TensorMut, ops::ViewOps};

use super::super::{Call, Collective, Fingerprint, Places, ReduceOp, combine::cuts};
use super::super::{failure::FailureReason, matching::mismatch};
use crate::sync::Mutex;

/// The size in bytes below which a collective is one worker's: waking the others takes longer.
const SMALL: usize = 1 << 16;

/// The key of a round: the group's calls have one count, transfers between two ranks another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RoundKey {
    All(u64),
    Pair { from: usize, to: usize, number: u64 },
}

impl RoundKey {
    pub(super) fn number(self) -> u64 {
        match self {
            RoundKey::All(number) | RoundKey::Pair { number, .. } => number,
        }
    }
}

/// The slot of a rank's result.
pub(super) type ResultSlot<R> = Arc<Mutex<Option<Done<R>>>>;

/// A rank's result: its memory, and the events that its queue must wait for.
pub(super) struct Done<R: Runtime> {
    pub(super) memory: Option<TensorMut<R>>,
    pub(super) after: Arc<Vec<R::Event>>,
}

/// A rank's call.
pub(super) struct RankCall<R: Runtime> {
    pub(super) call: Call<R>,
    pub(super) ready: R::Event,
    pub(super) slot: ResultSlot<R>,
}

/// The computation of one worker on the memory of a share.
#[derive(Clone, Copy, Debug)]
pub(super) enum RoundStep {
    /// Every output becomes the reduction of all outputs.
    ReduceAll(ReduceOp),
    /// Output `k` becomes the reduction of all outputs.
    ReduceInto(ReduceOp, usize),
    /// The only output becomes the reduction of the inputs.
    ReduceInputs(ReduceOp),
    /// Output `k` is copied to the others.
    Spread(usize),
    /// Input `i` is copied to output `i`; a single input to all.
    Copy,
}

/// A worker's part of a round.
pub(super) struct WorkerShare<R: Runtime> {
    pub(super) step: RoundStep,
    pub(super) ins: Vec<Tensor<R>>,
    pub(super) outs: Vec<MemoryPiece<R>>,
    pub(super) after: Arc<Vec<R::Event>>,
}

/// A piece of a rank's memory: piece `at` of member `of`.
pub(super) struct MemoryPiece<R: Runtime> {
    of: usize,
    at: usize,
    pub(super) memory: TensorMut<R>,
}

/// Pieces coming back, and the point in the worker's queue after which they are filled.
pub(super) struct Finished<R: Runtime> {
    pub(super) outs: Vec<MemoryPiece<R>>,
    pub(super) event: R::Event,
}

pub(super) struct Round<R: Runtime> {
    /// World ranks of the group.
    seats: Arc<[usize]>,
    /// The ranks that take part, in order.
    members: Vec<usize>,
    arrived: Vec<Option<RankCall<R>>>,
    first: Option<(usize, Fingerprint)>,
    slots: Vec<ResultSlot<R>>,
    pieces: Vec<Vec<Option<TensorMut<R>>>>,
    shares: usize,
    events: Vec<R::Event>,
}

impl<R: Runtime> Round<R> {
    pub(super) fn new(key: RoundKey, seats: Arc<[usize]>) -> Self {
        let members = match key {
            RoundKey::All(_) => (0..seats.len()).collect(),
            RoundKey::Pair { from, to, .. } => vec![from, to],
        };
        let arrived = members.iter().map(|_| None).collect();
        let (slots, pieces, events) = (Vec::new(), Vec::new(), Vec::new());
        Round { seats, members, arrived, first: None, slots, pieces, shares: 0, events }
    }

    /// Notes a rank's call; a mismatch with the first call to arrive is a failure.
    pub(super) fn arrive(&mut self, rank: usize, job: RankCall<R>, places: Places) -> Option<FailureReason> {
        let own = job.call.fingerprint();
        let at = self.members.iter().position(|&r| r == rank)?;
        self.arrived[at] = Some(job);
        let Some((other, first)) = &self.first else {
            self.first = Some((rank, own));
            return None;
        };
        mismatch(&self.seats, (*other, first), (rank, &own), places).map(|why| FailureReason::Mismatch { why })
    }

    pub(super) fn is_complete(&self) -> bool {
        self.arrived.iter().all(Option::is_some)
    }

    pub(super) fn missing(&self) -> Vec<usize> {
        let absent = |(job, &rank): (&Option<RankCall<R>>, &usize)| job.is_none().then_some(rank);
        if self.slots.is_empty() {
            self.arrived.iter().zip(&self.members).filter_map(absent).collect()
        } else {
            Vec::new()
        }
    }

    /// The first call, for messages.
    pub(super) fn described(&self) -> String {
        self.first.as_ref().map_or_else(String::new, |(rank, call)| self.called(*rank, call))
    }

    fn called(&self, rank: usize, call: &Fingerprint) -> String {
        format!("rank {} called {}", self.seats[rank], call.in_world(&self.seats))
    }

    /// Cuts the work into shares, each with the rank of its worker; empty if there is nothing to do.
    pub(super) fn shares(&mut self) -> Result<Vec<(usize, WorkerShare<R>)>> {
        let jobs: Vec<RankCall<R>> = self.arrived.iter_mut().filter_map(Option::take).collect();
        let calls: Vec<CallLengths> = jobs.iter().map(|j| CallLengths::of(&j.call)).collect();
        let headers = jobs.iter().any(|j| j.call.is_header());
        let what = self.first.as_ref().map_or(Collective::Barrier, |(_, f)| f.what);
        let mut after = Vec::with_capacity(jobs.len());
        let mut memory = Vec::with_capacity(jobs.len());
        for job in jobs {
            after.push(job.ready);
            self.slots.push(job.slot);
            memory.push(job.call.into_memory());
        }
        let after = Arc::new(after);
        let mut inputs = Vec::new();
        for ((input, output), plan) in memory.into_iter().zip(&calls) {
            inputs.push(input);
            let pieces = output.map_or_else(|| Ok(Vec::new()), |out| out.split(&plan.cuts(what, calls.len())))?;
            self.pieces.push(pieces.into_iter().map(Some).collect());
        }
        let shares = match headers {
            false => self.cut(what, &inputs, &calls, &after)?,
            true if what == Collective::AllToAll => {
                (0..calls.len()).try_for_each(|m| check_pairs(&calls, m, &self.seats)).map(|()| Vec::new())?
            }
            true => Vec::new(),
        };
        self.shares = shares.len();
        Ok(shares)
    }

    fn cut(
        &mut self,
        what: Collective,
        inputs: &[Option<Tensor<R>>],
        plans: &[CallLengths],
        after: &Arc<Vec<R::Event>>,
    ) -> Result<Vec<(usize, WorkerShare<R>)>> {
        let (n, mut shares) = (self.members.len(), Vec::new());
        let given = inputs.iter().all(Option::is_some) && !inputs.is_empty();
        if n == 1 && !given {
            // In place, a group of one already has its result, as the replicas of a pipeline without replicas.
            return Ok(shares);
        }
        let pieces = self.pieces.iter().map(Vec::len).max().unwrap_or(0);
        for k in 0..pieces {
            let column: Vec<(usize, usize)> = (0..n).filter(|&m| k < self.pieces[m].len()).map(|m| (m, k)).collect();
            let (step, ins, outs) = match what {
                Collective::AllReduce(op) => (RoundStep::ReduceAll(op), vec![], column),
                Collective::Reduce { op, root } => (RoundStep::ReduceInto(op, root), vec![], column),
                Collective::Broadcast { root } => (RoundStep::Spread(root), vec![], column),
                Collective::AllGather if given => {
                    (RoundStep::Copy, inputs.get(k).into_iter().flatten().cloned().collect(), column)
                }
                Collective::AllGather => (RoundStep::Spread(k), vec![], column),
                Collective::ReduceScatter(op) if !given => (RoundStep::ReduceInto(op, k), vec![], column),
                _ => continue,
            };
            shares.push((self.members[k], self.share(step, ins, &outs, after)));
        }
        for (m, plan) in plans.iter().enumerate() {
            let all = || (0..self.pieces[m].len()).map(|k| (m, k)).collect::<Vec<_>>();
            let (step, ins) = match what {
                Collective::ReduceScatter(op) if given => {
                    (RoundStep::ReduceInputs(op), parts(inputs, |_| plan.span(m))?)
                }
                Collective::AllToAll => (RoundStep::Copy, parts(inputs, |i| plans[i].span(m))?),
                Collective::Send { .. } | Collective::Recv { .. } if !self.pieces[m].is_empty() => {
                    (RoundStep::Copy, inputs.iter().flatten().cloned().collect())
                }
                _ => continue,
            };
            if what == Collective::AllToAll {
                check_pairs(plans, m, &self.seats)?;
            }
            let outs = all();
            shares.push((self.members[m], self.share(step, ins, &outs, after)));
        }
        Ok(shares)
    }

    fn share(
        &mut self,
        step: RoundStep,
        ins: Vec<Tensor<R>>,
        outs: &[(usize, usize)],
        after: &Arc<Vec<R::Event>>,
    ) -> WorkerShare<R> {
        let taken =
            outs.iter().filter_map(|&(of, at)| Some(MemoryPiece { of, at, memory: self.pieces[of][at].take()? }));
        WorkerShare { step, ins, outs: taken.collect(), after: after.clone() }
    }

    /// Takes pieces back from a worker; true if they were the last.
    pub(super) fn give_back(&mut self, finished: Finished<R>) -> bool {
        for piece in finished.outs {
            self.pieces[piece.of][piece.at] = Some(piece.memory);
        }
        self.events.push(finished.event);
        self.shares -= 1;
        self.shares == 0
    }

    /// Joins every rank's memory again, in its slot.
    pub(super) fn complete(self) -> Result<()> {
        let after = Arc::new(self.events);
        for (slot, pieces) in self.slots.into_iter().zip(self.pieces) {
            let memory = (!pieces.is_empty()).then(|| TensorMut::join(pieces.into_iter().flatten().collect()));
            *slot.lock() = Some(Done { memory: memory.transpose()?, after: after.clone() });
        }
        Ok(())
    }
}

/// The lengths in a call, kept after its memory was taken out.
struct CallLengths {
    send: Arc<[usize]>,
    recv: Arc<[usize]>,
    bytes: usize,
}

impl CallLengths {
    fn of<R: Runtime>(call: &Call<R>) -> CallLengths {
        CallLengths { send: call.send.clone(), recv: call.recv.clone(), bytes: call.dtype().size() }
    }

    /// The lengths of the output's pieces.
    fn cuts(&self, what: Collective, n: usize) -> Vec<usize> {
        match what {
            Collective::AllReduce(_) | Collective::Broadcast { .. } | Collective::Reduce { .. } => {
                let numel = self.recv[0];
                if numel * self.bytes < SMALL { vec![numel] } else { cuts(numel, n) }
            }
            _ => self.recv.to_vec(),
        }
    }

    /// The range of the part that this rank sends to rank `m`.
    fn span(&self, m: usize) -> std::ops::Range<usize> {
        let start = self.send[..m].iter().sum();
        start..start + self.send[m]
    }
}

/// A part of every input.
fn parts<R: Runtime>(
    inputs: &[Option<Tensor<R>>],
    span: impl Fn(usize) -> std::ops::Range<usize>,
) -> Result<Vec<Tensor<R>>> {
    let part = |(i, x): (usize, &Option<Tensor<R>>)| {
        let span = span(i);
        x.as_ref().map(|x| x.narrow(0, span.start, span.len()))
    };
    inputs.iter().enumerate().filter_map(part).collect()
}

/// Checks that rank `m` expects from each rank as many elements as that rank sends it.
fn check_pairs(plans: &[CallLengths], m: usize, seats: &[usize]) -> Result<()> {
    let differs = |&i: &usize| plans[i].send[m] != plans[m].recv[i];
    match (0..plans.len()).find(differs) {
        None => Ok(()),
        Some(i) => {
            let (sent, wanted) = (plans[i].send[m], plans[m].recv[i]);
            let (from, to) = (seats[i], seats[m]);
            let why = format!("rank {from} sends {sent} elements to rank {to}, which expects {wanted}");
            Err(numcore::Error::mismatch("all_to_all", why))
        }
    }
}
