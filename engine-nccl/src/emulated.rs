//! NCCL emulated on the host: ranks are threads of one process, and addresses are in host memory.
//!
//! It reproduces the behavior of the library that programs get wrong. Communicators are non-blocking, and a call is in
//! progress until all ranks it needs have made theirs. Calls of a rank run in order, calls of a group together.
//! Mismatched calls never end, and no error names them; errors come late. Sums are not in the order of ranks. On an
//! emulated GPU, calls are work of its streams, which begins behind the host, and may be captured and repeated.

mod arithmetic;

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use super::api::{NcclApi, Operation, RawComm, Status, UniqueId};

/// The status `ncclInvalidUsage`.
const INVALID_USAGE: Status = Status(5);
/// The status `ncclRemoteError`.
const REMOTE_ERROR: Status = Status(6);

/// Queues a call on a stream, given its handle, and for each address of the call whether it is written. The stream
/// begins the call, and then asks whether it has ended. Returns true if the call is captured, and none if there is no
/// such stream.
pub(crate) type QueueCall = dyn Fn(usize, &[(u64, bool)], Arc<BeginCall>) -> Option<bool> + Send + Sync;

/// Begins a call; the result tells whether it has ended.
pub type BeginCall = dyn Fn() -> Box<dyn Fn() -> bool + Send> + Send + Sync;

/// The emulated library.
#[derive(Default)]
pub(crate) struct EmulatedNccl {
    state: Arc<Mutex<State>>,
    ids: AtomicU64,
    /// The streams of calls; none for calls that begin when they are made.
    streams: Option<Box<QueueCall>>,
}

#[derive(Default)]
struct State {
    cliques: Vec<Clique>,
    /// Indices of cliques, by unique id.
    named: BTreeMap<u64, usize>,
    comms: BTreeMap<RawComm, Member>,
    /// The number of communicators made so far.
    made: usize,
    /// The number of operations of all ranks until one fails.
    failing: Option<u64>,
}

/// One rank of a communicator.
struct Member {
    clique: usize,
    rank: usize,
    error: Option<Status>,
    /// Captured calls, which live as long as their steps.
    captured: Vec<Weak<BeginCall>>,
}

/// All ranks of a communicator.
struct Clique {
    joined: Vec<Option<RawComm>>,
    ranks: Vec<RankCalls>,
    /// Incomplete splits, by number: each rank's color, key, and the slot of its communicator.
    splits: BTreeMap<u64, Vec<Option<SplitCall>>>,
}

type SplitCall = (Option<i32>, i32, &'static AtomicUsize);

/// The calls of a rank, in order. Calls of one group are one entry.
#[derive(Default)]
struct RankCalls {
    waiting: VecDeque<Vec<Call>>,
    /// The number of groups that have begun, and of those that have ended.
    begun: u64,
    ended: u64,
    splits: u64,
    splitting: bool,
}

#[derive(Clone, Copy)]
struct Call {
    operation: Operation,
    done: bool,
}

thread_local! {
    /// Operations of the group that is open on this thread, each with its stream.
    static GROUP: RefCell<Option<Vec<(RawComm, Operation, usize)>>> = const { RefCell::new(None) };
}

impl EmulatedNccl {
    /// Makes operation number `after` from now fail on its rank, as after a broken link.
    pub(crate) fn fail_after(&self, after: u64) {
        self.state.lock().failing = Some(after);
    }

    /// Makes calls on streams of emulated GPUs.
    pub(crate) fn on_streams(
        queue: impl Fn(usize, &[(u64, bool)], Arc<BeginCall>) -> Option<bool> + Send + Sync + 'static,
    ) -> EmulatedNccl {
        EmulatedNccl { streams: Some(Box::new(queue)), ..EmulatedNccl::default() }
    }

    fn start(&self, calls: Vec<(RawComm, Operation, usize)>) -> Status {
        let mut by_comm: BTreeMap<(RawComm, usize), Vec<Operation>> = BTreeMap::new();
        for (comm, operation, stream) in calls {
            by_comm.entry((comm, stream)).or_default().push(operation);
        }
        for ((comm, stream), calls) in by_comm {
            let Some(queue) = &self.streams else {
                if self.state.lock().begin(comm, &calls).is_none() {
                    return INVALID_USAGE;
                }
                continue;
            };
            let (state, accesses) =
                (self.state.clone(), calls.iter().flat_map(Operation::accesses).collect::<Vec<_>>());
            let begin: Arc<BeginCall> = Arc::new(move || {
                let (of, group) = (state.clone(), state.lock().begin(comm, &calls));
                Box::new(move || group.is_none_or(|group| of.lock().has_ended(comm, group)))
            });
            let captured = Arc::downgrade(&begin);
            let Some(is_captured) = queue(stream, &accesses, begin) else { return INVALID_USAGE };
            if let Some(member) = self.state.lock().comms.get_mut(&comm).filter(|_| is_captured) {
                member.captured.push(captured);
            }
        }
        Status::IN_PROGRESS
    }
}

impl State {
    fn counts_down(&mut self, calls: u64) -> bool {
        let Some(left) = self.failing else { return false };
        self.failing = left.checked_sub(calls);
        self.failing.is_none()
    }

    /// Begins calls of one group, and returns its number; `None` for a communicator that is gone.
    fn begin(&mut self, comm: RawComm, calls: &[Operation]) -> Option<u64> {
        let fails = self.counts_down(calls.len() as u64);
        let member = self.comms.get_mut(&comm)?;
        let clique = &mut self.cliques[member.clique];
        let own = &mut clique.ranks[member.rank];
        own.begun += 1;
        let group = own.begun;
        if fails {
            member.error = Some(REMOTE_ERROR);
            return Some(group);
        }
        own.waiting.push_back(calls.iter().map(|operation| Call { operation: *operation, done: false }).collect());
        clique.advance();
        Some(group)
    }

    /// Tells whether a group of calls has ended, for a failure or an abort too.
    fn has_ended(&self, comm: RawComm, group: u64) -> bool {
        let of = |member: &Member| self.cliques[member.clique].ranks[member.rank].ended;
        self.comms.get(&comm).is_none_or(|member| member.error.is_some() || of(member) >= group)
    }

    fn join(&mut self, clique: usize, rank: usize) -> RawComm {
        self.made += 1;
        let comm = RawComm(self.made);
        self.cliques[clique].joined[rank] = Some(comm);
        self.comms.insert(comm, Member { clique, rank, error: None, captured: Vec::new() });
        comm
    }

    fn clique(&mut self, ranks: usize) -> usize {
        let calls = (0..ranks).map(|_| RankCalls::default()).collect();
        self.cliques.push(Clique { joined: vec![None; ranks], ranks: calls, splits: BTreeMap::new() });
        self.cliques.len() - 1
    }

    /// Makes the communicators of a split that all ranks have called.
    fn divide(&mut self, calls: Vec<SplitCall>) {
        let colors: std::collections::BTreeSet<i32> = calls.iter().filter_map(|call| call.0).collect();
        for color in colors {
            let mut members: Vec<&SplitCall> = calls.iter().filter(|call| call.0 == Some(color)).collect();
            members.sort_by_key(|call| call.1);
            let clique = self.clique(members.len());
            for (rank, (_, _, slot)) in members.into_iter().enumerate() {
                slot.store(self.join(clique, rank).0, Ordering::Release);
            }
        }
    }
}

impl Member {
    /// Waits until the captured steps that have calls over the communicator are gone.
    fn wait_for_captured(&self) {
        while self.captured.iter().any(|call| call.strong_count() > 0) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Operation {
    /// The addresses of an operation, each with true if it is written.
    fn accesses(&self) -> impl Iterator<Item = (u64, bool)> + use<> {
        let (read, written) = match *self {
            Operation::AllReduce { at, .. } | Operation::Reduce { at, .. } | Operation::Broadcast { at, .. } => {
                (None, Some(at))
            }
            Operation::ReduceScatter { from, to, .. } | Operation::AllGather { from, to, .. } => (Some(from), Some(to)),
            Operation::Send { from, .. } => (Some(from), None),
            Operation::Recv { to, .. } => (None, Some(to)),
        };
        read.map(|at| (at, false)).into_iter().chain(written.map(|at| (at, true)))
    }
}

impl Clique {
    /// Runs the operations that all ranks they need have reached.
    fn advance(&mut self) {
        while self.run_collective() || self.run_transfers() {}
    }

    /// The index of a rank's first unfinished call that matches, in its front group.
    fn next(&self, rank: usize, of: impl Fn(&Operation) -> bool) -> Option<usize> {
        self.ranks[rank].waiting.front()?.iter().position(|call| !call.done && of(&call.operation))
    }

    fn run_collective(&mut self) -> bool {
        let collective = |op: &Operation| !matches!(op, Operation::Send { .. } | Operation::Recv { .. });
        let next: Option<Vec<usize>> = (0..self.ranks.len()).map(|rank| self.next(rank, collective)).collect();
        let Some(next) = next else { return false };
        let operations: Vec<Operation> =
            next.iter().zip(&self.ranks).map(|(&at, rank)| rank.waiting[0][at].operation).collect();
        // SAFETY: a caller that waits keeps the memory of its operation until it is done, or aborts it under the lock
        // held now.
        if !unsafe { arithmetic::collective(&operations) } {
            return false;
        }
        for (at, rank) in next.into_iter().zip(&mut self.ranks) {
            rank.waiting[0][at].done = true;
        }
        self.advance_fronts();
        true
    }

    fn run_transfers(&mut self) -> bool {
        let mut any = false;
        for from in 0..self.ranks.len() {
            for to in 0..self.ranks.len() {
                let send = self.next(from, |op| matches!(op, Operation::Send { to: peer, .. } if *peer == to));
                let recv = self.next(to, |op| matches!(op, Operation::Recv { from: peer, .. } if *peer == from));
                let (Some(send), Some(recv)) = (send, recv) else { continue };
                let pair = (self.ranks[from].waiting[0][send].operation, self.ranks[to].waiting[0][recv].operation);
                let (Operation::Send { from: source, bytes: sent, .. }, Operation::Recv { to: target, bytes, .. }) =
                    pair
                else {
                    continue;
                };
                if sent != bytes {
                    continue;
                }
                // SAFETY: as for collectives; the two are different memory of this size.
                unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, bytes) };
                self.ranks[from].waiting[0][send].done = true;
                self.ranks[to].waiting[0][recv].done = true;
                any = true;
            }
        }
        self.advance_fronts();
        any
    }

    fn advance_fronts(&mut self) {
        for rank in &mut self.ranks {
            while rank.waiting.front().is_some_and(|calls| calls.iter().all(|call| call.done)) {
                rank.waiting.pop_front();
                rank.ended += 1;
            }
        }
    }
}

impl NcclApi for EmulatedNccl {
    fn version(&self) -> i32 {
        23_007
    }

    fn takes_host_memory(&self) -> bool {
        true
    }

    fn unique_id(&self) -> Result<UniqueId, Status> {
        let mut id = [0; 128];
        id[..8].copy_from_slice(&self.ids.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(UniqueId(id))
    }

    fn init(&self, ranks: usize, id: &UniqueId, rank: usize) -> Result<RawComm, Status> {
        let mut state = self.state.lock();
        let number = u64::from_le_bytes(*id.0.first_chunk().ok_or(INVALID_USAGE)?);
        let clique = match state.named.get(&number) {
            Some(&clique) => clique,
            None => {
                let clique = state.clique(ranks);
                state.named.insert(number, clique);
                clique
            }
        };
        Ok(state.join(clique, rank))
    }

    fn split(&self, parent: RawComm, color: Option<i32>, key: i32) -> Result<&'static AtomicUsize, Status> {
        let mut state = self.state.lock();
        let (of, rank) = state.comms.get(&parent).map(|member| (member.clique, member.rank)).ok_or(INVALID_USAGE)?;
        let slot: &'static AtomicUsize = Box::leak(Box::new(AtomicUsize::new(0)));
        let clique = &mut state.cliques[of];
        if !clique.ranks[rank].waiting.is_empty() {
            return Err(INVALID_USAGE);
        }
        let number = clique.ranks[rank].splits;
        clique.ranks[rank].splits += 1;
        clique.ranks[rank].splitting = true;
        let size = clique.ranks.len();
        let calls = clique.splits.entry(number).or_insert_with(|| vec![None; size]);
        calls[rank] = Some((color, key, slot));
        if let Some(calls) = calls.iter().copied().collect::<Option<Vec<SplitCall>>>() {
            clique.splits.remove(&number);
            clique.ranks.iter_mut().for_each(|rank| rank.splitting = false);
            state.divide(calls);
        }
        Ok(slot)
    }

    fn state(&self, comm: RawComm) -> Status {
        let state = self.state.lock();
        let Some(member) = state.comms.get(&comm) else { return INVALID_USAGE };
        let clique = &state.cliques[member.clique];
        let own = &clique.ranks[member.rank];
        // On a stream, a call that is queued is no longer in progress.
        let is_moving = self.streams.is_none() && !own.waiting.is_empty();
        let waits = is_moving || own.splitting || clique.joined.iter().any(Option::is_none);
        member.error.unwrap_or(if waits { Status::IN_PROGRESS } else { Status::SUCCESS })
    }

    fn finalize(&self, _: RawComm) -> Status {
        Status::SUCCESS
    }

    fn destroy(&self, comm: RawComm) {
        let member = self.state.lock().comms.remove(&comm);
        member.into_iter().for_each(|member| member.wait_for_captured());
    }

    fn abort(&self, comm: RawComm) {
        let mut state = self.state.lock();
        let Some(member) = state.comms.remove(&comm) else { return };
        // Its queued operations no longer read or write memory.
        state.cliques[member.clique].ranks[member.rank].waiting.clear();
        drop(state);
        member.wait_for_captured();
    }

    fn group_start(&self) -> Status {
        GROUP.with_borrow_mut(|group| *group = Some(Vec::new()));
        Status::SUCCESS
    }

    fn group_end(&self) -> Status {
        match GROUP.take() {
            Some(calls) => self.start(calls),
            None => INVALID_USAGE,
        }
    }

    // SAFETY: the trait's conditions, which `advance` relies on.
    unsafe fn enqueue(&self, comm: RawComm, operation: &Operation, stream: usize) -> Status {
        let call = (comm, *operation, stream);
        let grouped = GROUP.with_borrow_mut(|group| group.as_mut().map(|calls| calls.push(call)).is_some());
        if grouped { Status::SUCCESS } else { self.start(vec![call]) }
    }

    fn error_text(&self, status: Status, _: Option<RawComm>) -> String {
        let text = match status {
            REMOTE_ERROR => "remote process exited or there was a network error",
            INVALID_USAGE => "invalid usage",
            _ => "an error",
        };
        format!("{text} (ncclResult_t {})", status.0)
    }
}
