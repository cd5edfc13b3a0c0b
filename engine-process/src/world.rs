//! A world of processes, as all threads of one process see it.

use std::sync::Arc;

use comm::{
    Deadlines, Fingerprint, Places,
    engine::{CallKinds, Failure, FailureReason, FlightRecorder},
};
use parking_lot::Mutex;

/// State shared by a world's communicators and the progress thread.
pub(crate) struct World {
    /// The number of the world in its process. All members make their worlds in the same order.
    pub(crate) number: u64,
    /// The ranks of the processes in it.
    pub(crate) members: Arc<[usize]>,
    pub(crate) deadlines: Deadlines,
    pub(crate) places: Places,
    /// The kinds of calls of this process, in worlds before this one too.
    pub(crate) kinds: Arc<Mutex<CallKinds>>,
    state: Mutex<State>,
}

struct State {
    failure: Option<Failure>,
    recorder: FlightRecorder,
}

impl World {
    pub(crate) fn new(
        number: u64,
        members: Arc<[usize]>,
        deadlines: Deadlines,
        kinds: Arc<Mutex<CallKinds>>,
        places: Places,
    ) -> Arc<Self> {
        let ranks = members.iter().max().map_or(0, |last| last + 1);
        let state = State { failure: None, recorder: FlightRecorder::new(ranks) };
        Arc::new(World { number, members, deadlines, places, kinds, state: Mutex::new(state) })
    }

    /// The first failure, if there was one.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.state.lock().failure.clone()
    }

    /// Records a call of a rank, of this process or another.
    pub(crate) fn note(&self, rank: usize, group: &Arc<[usize]>, number: u64, call: Fingerprint) {
        self.state.lock().recorder.note(rank, group.clone(), number, call);
    }

    /// Fails the world; the first reason is the one that all ranks report. Returns true if this was the first.
    pub(crate) fn fail(&self, why: FailureReason) -> bool {
        let mut state = self.state.lock();
        if state.failure.is_some() {
            return false;
        }
        let calls = state.recorder.lines();
        state.failure = Some(Failure { reason: why, calls });
        true
    }

    /// Fails the world as [`fail`](World::fail) does, with a failure that another rank found.
    pub(crate) fn fail_as(&self, failure: Failure) -> bool {
        let mut state = self.state.lock();
        let first = state.failure.is_none();
        state.failure.get_or_insert(failure);
        first
    }
}
