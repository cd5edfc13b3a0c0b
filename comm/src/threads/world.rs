//! The state shared by all ranks of all groups: rounds under one lock, and the first failure, which ends everything.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use numcore::{Error, ErrorKind, Runtime};

use super::super::{
    Collective, Deadlines, Places,
    deadlines::CallKinds,
    failure::{Failure, FailureReason, LEFT},
    recorder::FlightRecorder,
};
use super::{
    round::{Done, Finished, RankCall, ResultSlot, Round, RoundKey},
    task::WorkerTask,
};
use crate::sync::{Condvar, Instant, Mutex, mpsc::Sender};

pub(super) struct World<R: Runtime> {
    pub(super) deadlines: Deadlines,
    places: Places,
    state: Mutex<WorldState<R>>,
    changed: Condvar,
}

struct WorldState<R: Runtime> {
    failure: Option<Failure>,
    recorder: FlightRecorder,
    /// The groups with members that have not left, or with calls that are not done.
    groups: BTreeMap<usize, RankGroup<R>>,
    /// The number of groups made so far.
    made: usize,
    /// Groups that not every member has entered yet.
    names: BTreeMap<Name, usize>,
}

/// The name of a group that was split off: the parent group, the number of the split, the color. None: the world.
pub(super) type Name = Option<(usize, u64, usize)>;

struct RankGroup<R: Runtime> {
    /// World ranks of its members.
    seats: Arc<[usize]>,
    members: Vec<RankState<R>>,
    rounds: BTreeMap<RoundKey, Round<R>>,
}

struct RankState<R: Runtime> {
    queue: Option<Sender<WorkerTask<R>>>,
    /// The counts so far: collectives of the group, splits, and transfers to and from each rank.
    calls: u64,
    splits: u64,
    sent: BTreeMap<usize, u64>,
    received: BTreeMap<usize, u64>,
    kinds: CallKinds,
    left: bool,
}

impl<R: Runtime> World<R> {
    pub(super) fn new(ranks: usize, deadlines: Deadlines, places: Places) -> Arc<Self> {
        let recorder = FlightRecorder::new(ranks);
        let state = WorldState { failure: None, recorder, groups: BTreeMap::new(), made: 0, names: BTreeMap::new() };
        Arc::new(World { deadlines, places, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Enters a rank into the group of this name; the first member makes the group.
    pub(super) fn enter(&self, name: Name, seats: &Arc<[usize]>, rank: usize, queue: Sender<WorkerTask<R>>) -> usize {
        let mut state = self.state.lock();
        let WorldState { groups, made, names, .. } = &mut *state;
        let id = *names.entry(name).or_insert_with(|| {
            *made += 1;
            *made - 1
        });
        let group = groups.entry(id).or_insert_with(|| RankGroup::new(seats.clone()));
        group.members[rank].queue = Some(queue);
        if group.members.iter().all(|m| m.queue.is_some()) {
            names.remove(&name);
        }
        id
    }

    /// The number of earlier splits of this group, as this rank counts.
    pub(super) fn splits(&self, group: usize, rank: usize) -> u64 {
        let mut state = self.state.lock();
        let Some(group) = state.groups.get_mut(&group) else { return 0 };
        let splits = &mut group.members[rank].splits;
        *splits += 1;
        *splits - 1
    }

    /// Posts a rank's call, and returns the time that it may take. The last to arrive hands the work out.
    pub(super) fn post(
        self: &Arc<Self>,
        group: usize,
        rank: usize,
        job: RankCall<R>,
    ) -> Result<(RoundKey, Duration), Failure> {
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        self.arrive(&mut state, group, rank, job).map_err(|why| self.fail_with(&mut state, why))
    }

    fn arrive(
        self: &Arc<Self>,
        state: &mut WorldState<R>,
        group: usize,
        rank: usize,
        job: RankCall<R>,
    ) -> Result<(RoundKey, Duration), FailureReason> {
        let Some(own) = state.groups.get_mut(&group) else {
            return Err(FailureReason::Mismatch { why: "a call in a group that all of its ranks have left".into() });
        };
        let (key, fingerprint) = (own.number(rank, &job), job.call.fingerprint());
        let timeout = own.members[rank].kinds.deadline(&[], &fingerprint, job.call.timeout(), self.deadlines);
        state.recorder.note(own.seats[rank], own.seats.clone(), key.number(), fingerprint);
        let round = own.rounds.entry(key).or_insert_with(|| Round::new(key, own.seats.clone()));
        if let Some(why) = round.arrive(rank, job, self.places).or_else(|| own.left_member(key)) {
            return Err(why);
        }
        if own.rounds[&key].is_complete() {
            self.dispatch(own, group, key)?;
        }
        Ok((key, timeout))
    }

    fn dispatch(self: &Arc<Self>, own: &mut RankGroup<R>, group: usize, key: RoundKey) -> Result<(), FailureReason> {
        let Some(round) = own.rounds.get_mut(&key) else { return Ok(()) };
        let why = |error: Error| match error.kind() {
            ErrorKind::Mismatch { why, .. } => why.clone(),
            _ => error.to_string(),
        };
        let shares = round.shares().map_err(|error| FailureReason::Mismatch { why: why(error) })?;
        if shares.is_empty() {
            own.complete(key)?;
            self.changed.notify_all();
        }
        for (rank, share) in shares {
            let task = WorkerTask { world: self.clone(), group, key, rank, share };
            let sent = own.members[rank].queue.as_ref().is_some_and(|q| q.send(task).is_ok());
            if !sent {
                return Err(FailureReason::Peer { peer: own.seats[rank], cause: "its worker thread has ended".into() });
            }
        }
        Ok(())
    }

    /// Takes back a worker's finished share of a round.
    pub(super) fn finish(&self, group: usize, key: RoundKey, rank: usize, done: Result<Finished<R>, String>) {
        let mut state = self.state.lock();
        // The world has failed meanwhile, and every member has left.
        let Some(own) = state.groups.get_mut(&group) else { return };
        let settled = match (done, own.rounds.get_mut(&key)) {
            (Err(cause), _) => Err(FailureReason::Peer { peer: own.seats[rank], cause }),
            (Ok(finished), Some(round)) => match round.give_back(finished) {
                true => own.complete(key),
                false => return,
            },
            // The world has failed meanwhile: the memory goes back to its pool.
            (Ok(_), None) => return,
        };
        match settled {
            Ok(()) => {
                state.forget_if_over(group);
                self.changed.notify_all();
            }
            Err(why) => {
                self.fail_with(&mut state, why);
            }
        }
    }

    /// Blocks until the slot is filled, the world has failed, or the time is up.
    pub(super) fn wait(
        &self,
        group: usize,
        key: RoundKey,
        (since, timeout): (Instant, Duration),
        slot: &ResultSlot<R>,
    ) -> Result<Done<R>, Failure> {
        let deadline = since.checked_add(timeout);
        let mut state = self.state.lock();
        loop {
            if let Some(done) = slot.lock().take() {
                return Ok(done);
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let missing = state.missing(group, key);
            match deadline.filter(|_| !missing.is_empty()) {
                None => self.changed.wait(&mut state),
                Some(deadline) => {
                    if self.changed.wait_until(&mut state, deadline).timed_out() && Instant::now() >= deadline {
                        let missing = state.missing(group, key);
                        if state.failure.is_none() && !missing.is_empty() {
                            let why = FailureReason::Timeout { waited: since.elapsed(), missing, called: false };
                            return Err(self.fail_with(&mut state, why));
                        }
                    }
                }
            }
        }
    }

    pub(super) fn is_over(&self, slot: &ResultSlot<R>) -> bool {
        slot.lock().is_some() || self.state.lock().failure.is_some()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.state.lock().failure.clone()
    }

    pub(super) fn fail(&self, why: FailureReason) {
        self.fail_with(&mut self.state.lock(), why);
    }

    /// Fails the world. The first failure is the one that all ranks get. Memory of calls that cannot finish goes back.
    fn fail_with(&self, state: &mut WorldState<R>, why: FailureReason) -> Failure {
        let first = state.failure.get_or_insert_with(|| Failure { reason: why, calls: state.recorder.lines() }).clone();
        state.groups.values_mut().for_each(|g| g.rounds.clear());
        state.groups.retain(|_, g| !g.is_over());
        self.changed.notify_all();
        first
    }

    /// Notes that a rank's last handle is gone, which fails the world if others wait for it.
    pub(super) fn leave(&self, group: usize, rank: usize) {
        let mut state = self.state.lock();
        let Some(own) = state.groups.get_mut(&group) else { return };
        own.members[rank].left = true;
        match own.rounds.keys().find_map(|&key| own.left_member(key)) {
            Some(why) => {
                self.fail_with(&mut state, why);
            }
            None => state.forget_if_over(group),
        }
    }
}

impl<R: Runtime> WorldState<R> {
    /// World ranks missing in a round that others wait in.
    fn missing(&self, group: usize, key: RoundKey) -> Vec<usize> {
        let Some(group) = self.groups.get(&group) else { return Vec::new() };
        group.missing(key).into_iter().map(|rank| group.seats[rank]).collect()
    }

    /// Removes a group without members: its workers end.
    fn forget_if_over(&mut self, group: usize) {
        if self.groups.get(&group).is_some_and(RankGroup::is_over) {
            self.groups.remove(&group);
        }
    }
}

impl<R: Runtime> Default for RankState<R> {
    fn default() -> Self {
        let (sent, received) = (BTreeMap::new(), BTreeMap::new());
        RankState { queue: None, calls: 0, splits: 0, sent, received, kinds: CallKinds::default(), left: false }
    }
}

impl<R: Runtime> RankGroup<R> {
    fn new(seats: Arc<[usize]>) -> Self {
        let members = seats.iter().map(|_| RankState::default()).collect();
        RankGroup { seats, members, rounds: BTreeMap::new() }
    }

    /// Tells whether every member has entered and left, and every call is done.
    fn is_over(&self) -> bool {
        self.rounds.is_empty() && self.members.iter().all(|m| m.left)
    }

    /// The round of a rank's next call.
    fn number(&mut self, rank: usize, job: &RankCall<R>) -> RoundKey {
        let member = &mut self.members[rank];
        let next = |count: &mut u64| {
            *count += 1;
            *count - 1
        };
        match job.call.what() {
            Collective::Send { to } => {
                RoundKey::Pair { from: rank, to, number: next(member.sent.entry(to).or_default()) }
            }
            Collective::Recv { from } => {
                RoundKey::Pair { from, to: rank, number: next(member.received.entry(from).or_default()) }
            }
            _ => RoundKey::All(next(&mut member.calls)),
        }
    }

    fn missing(&self, key: RoundKey) -> Vec<usize> {
        self.rounds.get(&key).map_or_else(Vec::new, Round::missing)
    }

    /// The failure of a round in which a rank that has left is missing; none otherwise.
    fn left_member(&self, key: RoundKey) -> Option<FailureReason> {
        let peer = self.missing(key).into_iter().find(|&r| self.members[r].left)?;
        let what = self.rounds.get(&key)?.described();
        Some(FailureReason::Peer { peer: self.seats[peer], cause: format!("{LEFT} while {what}") })
    }

    /// Returns every rank its memory.
    fn complete(&mut self, key: RoundKey) -> Result<(), FailureReason> {
        let Some(round) = self.rounds.remove(&key) else { return Ok(()) };
        round.complete().map_err(|e| FailureReason::Mismatch { why: e.to_string() })
    }
}
