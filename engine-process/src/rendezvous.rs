//! The rendezvous of processes: all of a job at first, then the survivors after each loss, and newcomers with them.
//!
//! Survivors of a loss form a world over the connections that they have. Newcomers are met at the job's join address.
//! All *enter* new [`Processes`] there, by an exchange that ends only once all have entered. If it fails, the ranks
//! compare over the old connections who has entered. If all have, some may have gone on already, and the others follow.
//! If one has not, nobody has gone on, and the old connections stay.

use std::{
    cell::Cell,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use comm::{Collectives, Comm, Communicator, Membership, Patient, Quorum, Rendezvous};
use numcore::{Error, ErrorKind, Result, Runtime};
use parking_lot::Mutex;

use super::{
    Processes,
    progress::Patience,
    tcp::{Door, JoinAddress},
};

/// A rendezvous of the processes of a job. A process is lost when it dies or drops its [`Processes`]. Over TCP others
/// [join](crate::Tcp::from_lookup) the running job, if it has an address for that.
pub struct ProcessRendezvous<R: Runtime> {
    pub(crate) processes: Arc<Processes>,
    rt: R,
    quorum: Quorum,
    pub(crate) run: Run,
    /// True if this process has been in a world already.
    has_joined: bool,
    /// Processes with newcomers that this one has entered, while it is open whether all have.
    pub(crate) entered: Option<Arc<Processes>>,
    /// True if this process is on the host at which newcomers join.
    pub(crate) is_host: bool,
    /// True if this process has the first rank there in the last world, which listens for newcomers.
    listens: bool,
    door: Mutex<Option<Door>>,
}

/// The state of the run that processes compare at a rendezvous. A process that was in one more world, in which another
/// died, has the more recent state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Run {
    /// The number of the next world.
    generation: u64,
    /// The number of ranks of the last world.
    before: u64,
    committed: bool,
}

/// The words of a process to the others at a rendezvous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Word {
    run: Run,
    has_entered: bool,
    /// True if this process has heard newcomers.
    calls_newcomers: bool,
    /// True if this process is on the host at which newcomers join.
    is_host: bool,
}

impl Word {
    pub(crate) fn of(run: Run, is_host: bool) -> Word {
        Word { run, is_host, ..Word::default() }
    }

    fn to_bytes(self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&self.run.generation.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.run.before.to_le_bytes());
        let flags = [self.run.committed, self.has_entered, self.calls_newcomers, self.is_host];
        bytes[16..].copy_from_slice(&flags.map(u8::from));
        bytes
    }

    fn from_bytes(bytes: &[u8; 20]) -> Word {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|k| bytes[at + k]));
        let [committed, has_entered, calls_newcomers, is_host] = [16, 17, 18, 19].map(|at| bytes[at] != 0);
        Word { run: Run { generation: number(0), before: number(8), committed }, has_entered, calls_newcomers, is_host }
    }

    /// Tells all processes of a world; returns the words of each. Every process calls from here.
    pub(crate) fn tell<R: Runtime>(self, comm: &Comm<R>) -> Result<Vec<Word>> {
        // Nothing is compiled before it: it has no longer time as the first of its kind.
        let comm = Patient::over(comm, comm.timeout());
        Ok(comm.exchange_equal(self.to_bytes())?.iter().map(Word::from_bytes).collect())
    }
}

impl Run {
    /// The combined state of two processes.
    fn and(self, other: Run) -> Run {
        Run {
            generation: self.generation.max(other.generation),
            before: self.before.max(other.before),
            committed: self.committed || other.committed,
        }
    }
}

impl Processes {
    /// Makes this process's side of a rendezvous of all processes; every process makes one. A failed process is
    /// expected to drop its `Processes`, or to end. The others wait for that at most the
    /// [`join_timeout`](Quorum::join_timeout). With [`majority`](Quorum::majority), a process that hangs is left out
    /// then. Otherwise it ends the run, since it could come back. A process that dies during the rendezvous is left out
    /// too: the survivors try again until the [`join_timeout`](Quorum::join_timeout) has passed. All ranks of the last
    /// world take newcomers in together.
    ///
    /// # Errors
    /// An error if the transport does not report deaths to the survivors, or a death ends them. Over MPI the launcher
    /// must be that of Open MPI 5, started with `--with-ft ulfm`.
    pub fn rendezvous<R: Runtime>(self: &Arc<Self>, rt: R, quorum: Quorum) -> Result<ProcessRendezvous<R>> {
        if let Some(why) = self.no_recovery.as_ref().filter(|_| self.size() > 1) {
            return Err(Error::unsupported("Processes::rendezvous", why.clone()));
        }
        Ok(ProcessRendezvous {
            processes: self.clone(),
            rt,
            quorum,
            run: Run::default(),
            has_joined: false,
            entered: None,
            is_host: self.join_address.as_ref().is_some_and(JoinAddress::is_here),
            listens: false,
            door: Mutex::default(),
        })
    }
}

impl<R: Runtime> Rendezvous<R> for ProcessRendezvous<R> {
    fn next_world(&mut self) -> Result<Membership<R>> {
        // A process that did not come, perhaps because it was stopped, may not end either.
        self.form_world().inspect_err(|_| self.processes.note_failure())
    }

    fn newcomers(&self) -> usize {
        let mut door = self.door.lock();
        if let Some(at) = self.processes.join_address.as_ref().filter(|_| self.listens && door.is_none()) {
            *door = at.listen();
        }
        door.as_ref().map_or(0, Door::waiting)
    }

    fn committed(&mut self) {
        self.run.committed = true;
    }
}

impl<R: Runtime> ProcessRendezvous<R> {
    fn form_world(&mut self) -> Result<Membership<R>> {
        let most = self.quorum.join_timeout;
        // The time of a meeting begins when the attempt before it ends: ranks end an attempt a while apart.
        let begun = Cell::new(Instant::now());
        let left = || most.saturating_sub(begun.get().elapsed());
        // Newcomers with whom no meeting comes about do not keep the others.
        let mut calls = true;
        // Newcomers have no state of the run: one that is silent cannot go on without the others.
        let mut first_newcomer = None;
        loop {
            let mut comm = match self.has_joined {
                false => self.processes.world(&self.rt)?,
                true => {
                    // Of ranks that cannot reach each other, no more than half may leave the others out.
                    let leaves_out_all = self.quorum.majority && self.run.before > 0;
                    let leaves_out = if leaves_out_all { Some(0) } else { first_newcomer };
                    // With no time at all, one that has just not been heard yet would be left out.
                    self.processes.recover_within(&self.rt, Patience { timeout: left().max(most / 4), leaves_out })?
                }
            };
            let is_first = !std::mem::replace(&mut self.has_joined, true);
            let calls_newcomers = calls && self.newcomers() > 0;
            let has_entered = self.entered.is_some();
            let own = Word { run: self.run, has_entered, calls_newcomers, is_host: self.is_host };
            // Either all members have entered this world, or one has died since and the survivors enter another.
            let mut all = match own.tell(&comm) {
                Ok(all) => all,
                Err(error) if is_of_another(&comm, &error) && !left().is_zero() => continue,
                Err(error) => return Err(error),
            };
            if is_first && self.processes.is_newcomer {
                // The ranks of the job have told it in a world with a shorter timeout than this one.
                comm = self.processes.world(&self.rt)?;
            }
            let has_entered = all.iter().all(|word| word.has_entered);
            if let Some(entered) = self.entered.take().filter(|_| has_entered) {
                self.go_on_among(entered);
                (first_newcomer, calls) = (Some(comm.size()), false);
                begun.set(Instant::now());
                continue;
            }
            if let Some(caller) = all.iter().position(|word| word.calls_newcomers) {
                calls = false;
                match self.enter(&comm, caller, &left) {
                    Some(entered) => (comm, all) = entered,
                    None => {
                        begun.set(Instant::now());
                        continue;
                    }
                }
            }
            let run = all.iter().map(|word| word.run).fold(self.run, Run::and);
            if run.generation == 0 && self.processes.is_newcomer {
                return Err(Quorum::refused("every rank of the running job has ended"));
            }
            let newcomers = all.iter().filter(|word| run.generation > 0 && word.run.generation == 0).count();
            // The quorum is missed on all survivors alike.
            if let Some(why) = self.quorum.missing(comm.size(), comm.size() - newcomers, run.before as usize) {
                return Err(Quorum::refused(&why));
            }
            let is_new = self.run.generation == 0;
            self.run = Run { generation: run.generation + 1, before: comm.size() as u64, ..run };
            self.listens = comm.rank() == all.iter().position(|word| word.is_host).unwrap_or(0);
            // Newcomers find this process from now on.
            self.newcomers();
            if let Some(at) = self.processes.join_address.as_ref().filter(|_| is_new) {
                at.announce_member()?;
            }
            return Ok(Membership { comm, generation: run.generation, committed: run.committed, newcomers });
        }
    }

    /// Meets newcomers with all processes of a world, in half of the time that is `left`, and tells them in half of the
    /// rest. Returns the world with them, and the words of its processes; none if this process has not got so far.
    fn enter(&mut self, comm: &Comm<R>, caller: usize, left: &dyn Fn() -> Duration) -> Option<(Comm<R>, Vec<Word>)> {
        let at = self.processes.join_address.clone()?;
        // The one that has heard them changes places with rank 0, at which all meet.
        let rank = match comm.rank() {
            0 => caller,
            own if own == caller => 0,
            own => own,
        };
        let own = (rank, comm.size());
        let (open, door) = at.meet(own, self.door.get_mut().take(), left() / 2, &|| comm.poll()).ok()?;
        *self.door.get_mut() = door;
        let met = Arc::new(Processes::over(open).ok()?.configured_as(&self.processes));
        let all: Vec<usize> = (0..met.size()).collect();
        // A newcomer may be slow to call, which must leave time for the others to go on without it.
        let timeout = met.deadlines.call.min(left() / 2);
        let telling = met.world_with(&all, &self.rt, timeout, met.places).ok()??;
        match Word::of(self.run, self.is_host).tell(&telling) {
            Ok(all) => {
                let with_newcomers = met.world(&self.rt).ok()?;
                self.go_on_among(met);
                Some((with_newcomers, all))
            }
            // Whatever the error is: others may have gone on, and failed in a later call.
            Err(_) => {
                self.entered = Some(met);
                None
            }
        }
    }

    /// Leaves the processes so far for others, which have the ranks of the last world and newcomers.
    fn go_on_among(&mut self, processes: Arc<Processes>) {
        std::mem::replace(&mut self.processes, processes).finish();
    }
}

/// Tells whether the survivors can go on without the process that an error names, because it is not this one.
fn is_of_another<R: Runtime>(comm: &Comm<R>, error: &Error) -> bool {
    let own = comm.world_rank();
    match error.kind() {
        ErrorKind::Peer { peer, .. } => *peer != own,
        ErrorKind::Timeout { missing, .. } => !missing.contains(&own),
        _ => false,
    }
}

impl<R: Runtime> fmt::Debug for ProcessRendezvous<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessRendezvous(world {} of {:?})", self.run.generation, self.processes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_processes_know_together_is_the_most_that_one_knows() {
        let (few, many) =
            (Run { generation: 2, before: 5, committed: true }, Run { generation: 3, before: 4, committed: false });
        assert_eq!(few.and(many), Run { generation: 3, before: 5, committed: true });
        let word = Word { run: few, has_entered: false, calls_newcomers: true, is_host: true };
        assert_eq!(Word::from_bytes(&word.to_bytes()), word);
    }
}
