//! A new world of the processes that are left after some have died.

use std::{
    sync::mpsc::SyncSender,
    time::{Duration, Instant},
};

use numcore::{Error, ErrorKind, Result};

use super::{message::Message, progress::Progress};

/// What the processes have told each other: how many worlds each has made, and whom it knows to be dead.
pub(crate) struct Recovery {
    told: Vec<Option<(u64, Vec<usize>)>>,
    /// Worlds that had been made when the last recovery ended: who speaks of no more than these speaks of that recovery.
    over: Option<u64>,
    own: Option<Own>,
}

struct Own {
    made: u64,
    since: Instant,
    timeout: Duration,
    outcome: SyncSender<Result<(u64, Vec<usize>)>>,
}

impl Recovery {
    pub(crate) fn new(size: usize) -> Self {
        Recovery { told: vec![None; size], over: None, own: None }
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.own.is_some()
    }
}

impl Progress {
    pub(crate) fn begin_recovery(
        &mut self,
        made: u64,
        timeout: Duration,
        outcome: SyncSender<Result<(u64, Vec<usize>)>>,
    ) {
        self.recovery.own = Some(Own { made, since: Instant::now(), timeout, outcome });
        self.tell_recovery();
    }

    /// Another process has said whom it misses.
    pub(crate) fn hear_recovery(&mut self, from: usize, made: u64, dead: Vec<usize>) {
        if self.recovery.over.is_none_or(|over| made > over) {
            self.recovery.told[from] = Some((made, dead));
        }
    }

    /// One more has died, or come to its end: what was said before no longer counts.
    pub(crate) fn recovery_lost(&mut self) {
        if self.recovery.is_under_way() {
            self.tell_recovery();
        }
    }

    fn tell_recovery(&mut self) {
        let Some(own) = &self.recovery.own else { return };
        let message = Message::Recover { made: own.made, dead: self.known_lost() };
        let all: Vec<usize> = (0..self.mpi.size()).collect();
        self.tell_others(&all, &message);
    }

    /// Processes that have died, and those that will start nothing any more: none of them is in another world.
    fn known_lost(&self) -> Vec<usize> {
        (0..self.dead.len()).filter(|&rank| self.dead[rank] || self.gone[rank]).collect()
    }

    /// All that are left know of the same dead: they are the new world.
    pub(crate) fn advance_recovery(&mut self) {
        let Some(own) = &self.recovery.own else { return };
        let (me, dead) = (self.mpi.rank(), self.known_lost());
        let left: Vec<usize> = (0..self.dead.len()).filter(|rank| !dead.contains(rank)).collect();
        let agrees = |&&rank: &&usize| {
            rank == me || self.recovery.told[rank].as_ref().is_some_and(|(_, theirs)| *theirs == dead)
        };
        let absent: Vec<usize> = left.iter().filter(|rank| !agrees(rank)).copied().collect();
        let outcome = if absent.is_empty() {
            let made = left.iter().filter_map(|&r| self.recovery.told[r].as_ref()).map(|(made, _)| *made);
            Ok((made.fold(own.made, u64::max), left))
        } else if own.since.elapsed() > own.timeout {
            let (waited, calls) = (own.since.elapsed(), String::new());
            Err(Error::from(ErrorKind::Timeout { op: "recover", waited, missing: absent, called: false, calls })
                .on_rank(me))
        } else {
            return;
        };
        if let Some(own) = self.recovery.own.take() {
            self.recovery.told.iter_mut().for_each(|told| *told = None);
            self.recovery.over = outcome.as_ref().ok().map(|(number, _)| *number).or(self.recovery.over);
            // Nobody waits any more: nothing to tell.
            let _ = own.outcome.send(outcome);
        }
    }
}
