//! Recovery: a new world of the processes that survive after others have died.
//!
//! Each survivor announces the processes it knows to be lost, and announces again when it learns of one more. It has
//! its new world once all survivors have announced the same list as its own. Two survivors may reach that point with
//! different losses. The larger world then has a dead process in it and fails, and its members recover into the smaller
//! one. Announcements beyond those a process has agreed to are therefore kept for its next agreement.

use std::{
    collections::VecDeque,
    sync::mpsc::SyncSender,
    time::{Duration, Instant},
};

use numcore::{Error, ErrorKind, Result};

use super::Progress;
use crate::message::Message;

/// The announcements of all processes: the number of worlds each has made, and the processes it knows to be lost.
pub(crate) struct Recovery {
    /// Announcements that no world has used yet, by process, in order of arrival.
    announced: Vec<VecDeque<(u64, Vec<usize>)>>,
    own: Option<OwnRecovery>,
}

struct OwnRecovery {
    made: u64,
    /// The list of lost processes that was announced last.
    announced: Option<Vec<usize>>,
    since: Instant,
    patience: Patience,
    outcome: SyncSender<Result<(u64, Vec<usize>)>>,
}

/// The time that a recovery waits for survivors, and its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) timeout: Duration,
    /// The first of the ranks that are left out if they have said nothing by then. With a silent one before it, or no
    /// such rank, the recovery fails.
    pub(crate) leaves_out: Option<usize>,
}

impl Recovery {
    pub(crate) fn new(size: usize) -> Self {
        Recovery { announced: vec![VecDeque::new(); size], own: None }
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.own.is_some()
    }

    fn store(&mut self, from: usize, made: u64, lost: Vec<usize>) {
        self.announced[from].push_back((made, lost));
    }

    /// Tells whether another process goes on without process `me`.
    fn is_left_out(&self, me: usize) -> bool {
        self.announced.iter().flatten().any(|(_, lost)| lost.contains(&me))
    }

    /// The number of the next world, if all survivors have announced the same losses as process `me`, which has made
    /// `own_made` worlds. Otherwise, the survivors that have not.
    fn agree(&mut self, me: usize, own_made: u64, lost: &[usize]) -> Result<u64, Vec<usize>> {
        let others: Vec<usize> = (0..self.announced.len()).filter(|rank| *rank != me && !lost.contains(rank)).collect();
        let announcement = |rank: usize| self.announced[rank].iter().position(|(_, theirs)| theirs == lost);
        let absent: Vec<usize> = others.iter().copied().filter(|rank| announcement(*rank).is_none()).collect();
        if !absent.is_empty() {
            return Err(absent);
        }
        let places: Vec<(usize, usize)> =
            others.iter().filter_map(|rank| Some((*rank, announcement(*rank)?))).collect();
        let mut number = own_made;
        for (rank, place) in places {
            // Earlier announcements are of fewer losses, so they are dropped too.
            number = self.announced[rank]
                .drain(..=place)
                .map(|(made, _)| made)
                .next_back()
                .map_or(number, |m| m.max(number));
        }
        Ok(number)
    }
}

impl Progress {
    pub(crate) fn begin_recovery(
        &mut self,
        made: u64,
        patience: Patience,
        outcome: SyncSender<Result<(u64, Vec<usize>)>>,
    ) {
        self.recovery.own = Some(OwnRecovery { made, announced: None, since: Instant::now(), patience, outcome });
        self.announce_recovery();
    }

    /// Stores the announcement of another process.
    pub(crate) fn store_announcement(&mut self, from: usize, made: u64, dead: Vec<usize>) {
        self.recovery.store(from, made, dead);
    }

    /// Announces anew after a process has died or ended: the earlier announcement no longer counts.
    pub(crate) fn recovery_lost(&mut self) {
        if self.recovery.is_under_way() {
            self.announce_recovery();
        }
    }

    fn announce_recovery(&mut self) {
        let lost = self.known_lost();
        // An announcement is never repeated: the second one would be left over for the next recovery.
        let Some(own) = self.recovery.own.as_mut().filter(|own| own.announced.as_ref() != Some(&lost)) else { return };
        own.announced = Some(lost.clone());
        let message = Message::Recover { made: own.made, dead: lost };
        let all: Vec<usize> = (0..self.transport.size()).collect();
        self.send_to_all(&all, &message);
    }

    /// Processes that have died, and those that will start no more calls. Neither is in a new world.
    fn known_lost(&self) -> Vec<usize> {
        (0..self.dead.len()).filter(|&rank| self.dead[rank] || self.gone[rank]).collect()
    }

    /// Counts silent processes among the lost, and tells the others, which have the whole time for it.
    fn leave_out(&mut self, silent: &[usize]) {
        silent.iter().for_each(|&rank| self.gone[rank] = true);
        if let Some(own) = &mut self.recovery.own {
            own.since = Instant::now();
        }
        self.announce_recovery();
    }

    /// Ends the recovery once all survivors have announced the same losses; they are the new world.
    pub(crate) fn advance_recovery(&mut self) {
        let (me, lost) = (self.transport.rank(), self.known_lost());
        let Some(own) = &self.recovery.own else { return };
        let (made, waited, is_late) = (own.made, own.since.elapsed(), own.since.elapsed() > own.patience.timeout);
        let leaves_out = own.patience.leaves_out;
        let outcome = match self.recovery.agree(me, made, &lost) {
            _ if self.recovery.is_left_out(me) => {
                let why = "this process was silent for too long, and the others go on without it: start it again";
                Err(Error::argument("recover", why).on_rank(me))
            }
            Ok(number) => Ok((number, (0..self.dead.len()).filter(|rank| !lost.contains(rank)).collect())),
            Err(absent) if is_late => {
                // A process that has announced anything is alive, but did not know of the same losses yet.
                let is_silent = |rank: &&usize| self.recovery.announced[**rank].is_empty();
                let silent: Vec<usize> = absent.iter().filter(is_silent).copied().collect();
                let leaves_out = leaves_out.is_some_and(|first| silent.iter().all(|&rank| rank >= first));
                if leaves_out && !silent.is_empty() {
                    return self.leave_out(&silent);
                }
                let missing = if silent.is_empty() { absent } else { silent };
                // Other survivors give up too, so their announcements of this recovery are dropped.
                self.recovery.announced.iter_mut().for_each(VecDeque::clear);
                let late = ErrorKind::Timeout { op: "recover", waited, missing, called: false, calls: String::new() };
                Err(Error::from(late).on_rank(me))
            }
            Err(_) => return,
        };
        if let Some(own) = self.recovery.own.take() {
            // A failed send is harmless: the caller no longer waits.
            let _ = own.outcome.send(outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use numcore::rng::Philox;

    use super::*;

    /// A process, as far as the others can observe it.
    struct Process {
        recovery: Recovery,
        lost: Vec<usize>,
        /// The number of worlds it has made; all processes start in one.
        made: u64,
        /// The last world: its number and members.
        world: (u64, Vec<usize>),
        is_recovering: bool,
        /// Worlds that have failed, according to messages of others.
        failed: Vec<u64>,
        is_dead: bool,
    }

    /// A message from one process to another; messages arrive in order.
    #[derive(Clone)]
    enum Word {
        Recover(u64, Vec<usize>),
        /// A world has failed.
        Fail(u64),
        Dead,
    }
    type Link = VecDeque<Word>;

    struct Job {
        processes: Vec<Process>,
        /// Links by sender and receiver.
        links: Vec<Vec<Link>>,
    }

    impl Job {
        fn new(n: usize) -> Job {
            let process = |_| Process {
                recovery: Recovery::new(n),
                lost: Vec::new(),
                made: 1,
                world: (0, (0..n).collect()),
                is_recovering: false,
                failed: Vec::new(),
                is_dead: false,
            };
            Job { processes: (0..n).map(process).collect(), links: vec![vec![Link::new(); n]; n] }
        }

        fn broadcast_failure(&mut self, from: usize, word: &Word) {
            self.links[from].iter_mut().for_each(|link| link.push_back(word.clone()));
        }

        fn recover(&mut self, rank: usize) {
            let word = Word::Recover(self.processes[rank].made, self.processes[rank].lost.clone());
            self.broadcast_failure(rank, &word);
        }

        /// Kills a process: its earlier messages arrive, and then its death is seen.
        fn kill(&mut self, rank: usize) {
            self.processes[rank].is_dead = true;
            self.broadcast_failure(rank, &Word::Dead);
        }

        /// Fails the current world of a process.
        fn fail(&mut self, rank: usize) {
            if !std::mem::replace(&mut self.processes[rank].is_recovering, true) {
                let number = self.processes[rank].world.0;
                self.broadcast_failure(rank, &Word::Fail(number));
                self.recover(rank);
            }
        }

        fn arrive(&mut self, from: usize, to: usize) {
            let Some(word) = self.links[from][to].pop_front() else { return };
            let process = &mut self.processes[to];
            match word {
                Word::Recover(made, lost) => process.recovery.store(from, made, lost),
                Word::Fail(number) => process.failed.push(number),
                Word::Dead => {
                    process.lost.push(from);
                    process.lost.sort_unstable();
                    if process.is_recovering {
                        self.recover(to);
                    }
                }
            }
            self.advance(to);
        }

        fn advance(&mut self, rank: usize) {
            loop {
                let process = &mut self.processes[rank];
                if !process.is_recovering {
                    let (number, members) = &process.world;
                    if !process.failed.contains(number) && !members.iter().any(|member| process.lost.contains(member)) {
                        return;
                    }
                    self.fail(rank);
                }
                let process = &mut self.processes[rank];
                let Ok(number) = process.recovery.agree(rank, process.made, &process.lost) else { return };
                let members =
                    (0..process.recovery.announced.len()).filter(|other| !process.lost.contains(other)).collect();
                (process.made, process.world, process.is_recovering) = (number + 1, (number, members), false);
            }
        }
    }

    #[test]
    fn those_that_are_left_come_to_one_world_whenever_others_die() {
        for seed in 0..600 {
            let mut random = Philox::new(seed, 0);
            let n = 2 + random.below(5) as usize;
            let mut job = Job::new(n);
            let mut pick = |n: usize| random.below(n as u64) as usize;
            let mut deaths = 1 + pick(n - 1);
            let mut failures = pick(3);
            for _ in 0..10_000 {
                let what = pick(12);
                let rank = pick(n);
                let is_last = job.processes.iter().filter(|process| !process.is_dead).count() == 1;
                if what == 0 && deaths > 0 && !job.processes[rank].is_dead && !is_last {
                    job.kill(rank);
                    deaths -= 1;
                } else if what == 1 && failures > 0 {
                    // A world fails without a death: all of its processes recover.
                    failures -= 1;
                    if !job.processes[rank].is_dead {
                        job.fail(rank);
                        job.advance(rank);
                    }
                } else {
                    let (from, to) = (pick(n), pick(n));
                    if from != to && !job.processes[to].is_dead {
                        job.arrive(from, to);
                    }
                }
            }
            let left: Vec<&Process> = job.processes.iter().filter(|process| !process.is_dead).collect();
            let members: Vec<usize> = (0..n).filter(|rank| !job.processes[*rank].is_dead).collect();
            assert!(left.iter().all(|process| !process.is_recovering), "seed {seed}: one waits still");
            assert!(left.iter().all(|process| process.world == left[0].world), "seed {seed}: two worlds");
            assert_eq!(left[0].world.1, members, "seed {seed}");
        }
    }

    #[test]
    fn what_is_said_beyond_what_was_agreed_on_is_kept() {
        let mut own = Recovery::new(4);
        own.store(2, 1, vec![1]);
        own.store(3, 1, vec![1]);
        // Process 3 has died since; process 2 knew of it before it could agree.
        own.store(2, 1, vec![1, 3]);
        assert_eq!(own.agree(0, 1, &[1]), Ok(1));
        assert_eq!(own.agree(0, 2, &[1]), Err(vec![2, 3]));
        assert_eq!(own.agree(0, 2, &[1, 3]), Ok(2));
        assert_eq!(own.agree(0, 3, &[1, 3]), Err(vec![2]));
    }
}
