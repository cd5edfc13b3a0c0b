//! The forming of worlds of ranks that are threads of one process.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use numcore::{Error, Result, Runtime};

use super::super::{Comm, Deadlines, Membership, Places, Quorum, Rendezvous};
use super::ThreadCommunicator;
use crate::sync::{Condvar, Instant, Mutex};

/// The rendezvous of ranks that are threads of this process. Ranks of the last world are waited for until they come or
/// leave, or the [`join_timeout`](Quorum::join_timeout) has passed. A rank that [joins](ThreadRendezvous::join) is
/// taken into the next world, if it is on the others' device.
#[derive(Clone)]
pub struct ThreadRendezvous<R: Runtime> {
    shared: Arc<Shared<R>>,
}

/// The place of a rank in a [`ThreadRendezvous`]; a rank leaves by dropping it.
pub struct ThreadSeat<R: Runtime> {
    shared: Arc<Shared<R>>,
    seat: usize,
    rt: R,
}

struct Shared<R: Runtime> {
    quorum: Quorum,
    deadlines: Deadlines,
    places: Places,
    state: Mutex<RendezvousState<R>>,
    changed: Condvar,
}

/// The state of a rendezvous. Seats are numbered in the order in which they were taken.
struct RendezvousState<R: Runtime> {
    seats: usize,
    generation: u64,
    committed: bool,
    /// Ranks of the last world that have not left, or of the first one that is to be.
    members: BTreeSet<usize>,
    /// The number of ranks of the last world.
    before: usize,
    waiting: BTreeMap<usize, R>,
    /// The arrival of the first member that waits now.
    since: Option<Instant>,
    /// The results of the last forming, until each rank has taken its own.
    outcomes: BTreeMap<usize, Result<Membership<R>, String>>,
}

impl<R: Runtime> ThreadRendezvous<R> {
    /// Makes a rendezvous, and the seats of the first world, one for each runtime. Calls of its worlds may take
    /// as long as `deadlines` allow.
    pub fn new(
        runtimes: Vec<R>,
        quorum: Quorum,
        deadlines: impl Into<Deadlines>,
    ) -> Result<(Self, Vec<ThreadSeat<R>>)> {
        Self::at_places(runtimes, quorum, deadlines, Places::Same)
    }

    /// Makes a rendezvous as [`new`](ThreadRendezvous::new) does; `places` sets the source lines from which matching
    /// calls may come.
    pub fn at_places(
        runtimes: Vec<R>,
        quorum: Quorum,
        deadlines: impl Into<Deadlines>,
        places: Places,
    ) -> Result<(Self, Vec<ThreadSeat<R>>)> {
        let ranks = runtimes.len();
        if ranks == 0 {
            return Err(Error::range("ThreadRendezvous", "number of runtimes", 0u64, "at least 1"));
        }
        if let Some(why) = quorum.missing(ranks, ranks, 0) {
            return Err(Error::config("Quorum", "min_ranks", why));
        }
        let state = RendezvousState {
            seats: ranks,
            generation: 0,
            committed: false,
            members: (0..ranks).collect(),
            before: 0,
            waiting: BTreeMap::new(),
            since: None,
            outcomes: BTreeMap::new(),
        };
        let shared = Arc::new(Shared {
            quorum,
            deadlines: deadlines.into(),
            places,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let seat = |(seat, rt)| ThreadSeat { shared: shared.clone(), seat, rt };
        let seats = runtimes.into_iter().enumerate().map(seat).collect();
        Ok((ThreadRendezvous { shared }, seats))
    }

    /// Makes the seat of a rank that is in no world yet. If its runtime is on another device than the others', its own
    /// [`next_world`](Rendezvous::next_world) is an error, the others' are not.
    pub fn join(&self, rt: R) -> ThreadSeat<R> {
        let mut state = self.shared.state.lock();
        state.seats += 1;
        ThreadSeat { shared: self.shared.clone(), seat: state.seats - 1, rt }
    }
}

impl<R: Runtime> Rendezvous<R> for ThreadSeat<R> {
    fn next_world(&mut self) -> Result<Membership<R>> {
        let Shared { quorum, state, changed, .. } = &*self.shared;
        let mut state = state.lock();
        state.waiting.insert(self.seat, self.rt.clone());
        if state.members.contains(&self.seat) {
            state.since.get_or_insert_with(Instant::now);
        }
        loop {
            if let Some(outcome) = state.outcomes.remove(&self.seat) {
                return outcome.map_err(|why| Quorum::refused(&why));
            }
            let deadline = state.since.and_then(|since| since.checked_add(quorum.join_timeout));
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if self.shared.decide(&mut state, is_over) {
                changed.notify_all();
                continue;
            }
            match deadline.filter(|_| !is_over) {
                Some(deadline) => drop(changed.wait_until(&mut state, deadline)),
                None => changed.wait(&mut state),
            }
        }
    }

    fn newcomers(&self) -> usize {
        let state = self.shared.state.lock();
        state.waiting.keys().filter(|seat| !state.members.contains(seat)).count()
    }

    fn committed(&mut self) {
        self.shared.state.lock().committed = true;
    }
}

impl<R: Runtime> Drop for ThreadSeat<R> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.members.remove(&self.seat);
        state.waiting.remove(&self.seat);
        state.outcomes.remove(&self.seat);
        self.shared.changed.notify_all();
    }
}

impl<R: Runtime> Shared<R> {
    /// Forms a world, or refuses it, if either is clear by now; `is_over` is true if the wait for ranks is over.
    /// Returns true if it did either.
    fn decide(&self, state: &mut RendezvousState<R>, is_over: bool) -> bool {
        let waits = |seat: &&usize| state.waiting.contains_key(*seat);
        let back: Vec<usize> = state.members.iter().filter(waits).copied().collect();
        let absent = state.members.len() - back.len();
        if state.waiting.is_empty() || (back.is_empty() && absent > 0) || (absent > 0 && !is_over) {
            return false;
        }
        if state.members.is_empty() {
            state.refuse("every rank of the last world has left, with the state of the run");
            return true;
        }
        match self.quorum.missing(state.waiting.len(), back.len(), state.before) {
            // Others may still join.
            Some(_) if !is_over && self.quorum.missing(usize::MAX, back.len(), state.before).is_none() => return false,
            Some(why) => state.refuse(&why),
            None => state.form(&back, self),
        }
        true
    }
}

impl<R: Runtime> RendezvousState<R> {
    /// Refuses all waiting ranks, which are in no world any more.
    fn refuse(&mut self, why: &str) {
        for seat in std::mem::take(&mut self.waiting).into_keys() {
            self.members.remove(&seat);
            self.outcomes.insert(seat, Err(why.into()));
        }
        self.since = None;
    }

    /// Refuses the newcomers that cannot be in a world with the first rank, or, if each could, all of them. The other
    /// ranks go on waiting.
    fn refuse_newcomers(&mut self, first: usize, new: &[usize], why: &Error, shared: &Shared<R>) {
        let unfit = |seat: &usize| {
            let two = [first, *seat].iter().filter_map(|seat| self.waiting.get(seat).cloned()).collect();
            let error = ThreadCommunicator::members(two, shared.deadlines, shared.places).err()?;
            Some((*seat, error.to_string()))
        };
        let mut refused: Vec<(usize, String)> = new.iter().filter_map(unfit).collect();
        if refused.is_empty() {
            refused = new.iter().map(|seat| (*seat, why.to_string())).collect();
        }
        for (seat, why) in refused {
            self.waiting.remove(&seat);
            self.outcomes.insert(seat, Err(why));
        }
    }

    /// Forms a world of all waiting ranks: first the ranks `back` of the last one, then the newcomers. Newcomers are
    /// refused if the world cannot be made with them.
    fn form(&mut self, back: &[usize], shared: &Shared<R>) {
        let new: Vec<usize> = self.waiting.keys().filter(|seat| !back.contains(seat)).copied().collect();
        let seats: Vec<usize> = back.iter().chain(&new).copied().collect();
        let runtimes = seats.iter().filter_map(|seat| self.waiting.get(seat).cloned()).collect();
        let comms = match ThreadCommunicator::members(runtimes, shared.deadlines, shared.places) {
            Ok(comms) => comms,
            // An unfit newcomer must not end the run of the ranks that were there.
            Err(error) if !new.is_empty() => return self.refuse_newcomers(seats[0], &new, &error, shared),
            Err(error) => return self.refuse(&error.to_string()),
        };
        self.waiting.clear();
        self.since = None;
        let (generation, committed, newcomers) = (self.generation, self.committed, new.len());
        let membership = |comm: Comm<R>| Ok(Membership { comm, generation, committed, newcomers });
        self.outcomes.extend(seats.iter().copied().zip(comms.into_iter().map(membership)));
        self.generation += 1;
        self.before = seats.len();
        self.members = seats.into_iter().collect();
    }
}

impl<R: Runtime> fmt::Debug for ThreadRendezvous<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        write!(f, "ThreadRendezvous(world {} of {:?}, {} wait)", state.generation, state.members, state.waiting.len())
    }
}

impl<R: Runtime> fmt::Debug for ThreadSeat<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadSeat({})", self.seat)
    }
}
