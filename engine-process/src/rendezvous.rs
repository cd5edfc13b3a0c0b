//! The meetings of processes: all of a job at first, and those that are left whenever some are lost.

use std::{fmt, sync::Arc, time::Instant};

use comm::{Collectives, Comm, Communicator, Membership, Quorum, Rendezvous};
use numcore::{Error, ErrorKind, Result, Runtime};

use super::Processes;

/// Where the processes of a job meet. A process is lost when it dies, or drops its [`Processes`]; none can join a job that runs.
pub struct ProcessRendezvous<R: Runtime> {
    processes: Arc<Processes>,
    rt: R,
    quorum: Quorum,
    run: Run,
    /// Whether this process was in a world already.
    has_met: bool,
}

/// What processes tell each other when they meet. One that has made a world more than others, in which somebody died, knows more than they.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Run {
    /// The number of the next world.
    generation: u64,
    /// How many ranks the last world had.
    before: u64,
    committed: bool,
}

impl Run {
    fn to_bytes(self) -> [u8; 17] {
        let mut bytes = [0; 17];
        bytes[..8].copy_from_slice(&self.generation.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.before.to_le_bytes());
        bytes[16] = self.committed.into();
        bytes
    }

    fn from_bytes(bytes: &[u8; 17]) -> Run {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|k| bytes[at + k]));
        Run { generation: number(0), before: number(8), committed: bytes[16] != 0 }
    }

    /// What the two know together.
    fn and(self, other: Run) -> Run {
        Run {
            generation: self.generation.max(other.generation),
            before: self.before.max(other.before),
            committed: self.committed || other.committed,
        }
    }
}

impl Processes {
    /// This process's side of a rendezvous of all processes, which all make. A process that has failed drops its `Processes` soon, or ends: the others wait for that no longer than
    /// the [`join_timeout`](Quorum::join_timeout), and one that hangs ends the run, since it could come back. Whoever dies while they meet is left out too: they meet again, until
    /// the [`join_timeout`](Quorum::join_timeout) has passed.
    ///
    /// # Errors
    /// Where the death of a process is not reported to the others, or ends them: over MPI the launcher must be that of Open MPI 5, started with `--with-ft ulfm`.
    pub fn rendezvous<R: Runtime>(self: &Arc<Self>, rt: R, quorum: Quorum) -> Result<ProcessRendezvous<R>> {
        if let Some(why) = self.no_recovery.as_ref().filter(|_| self.size() > 1) {
            return Err(Error::argument("Processes::rendezvous", why.clone()));
        }
        Ok(ProcessRendezvous { processes: self.clone(), rt, quorum, run: Run::default(), has_met: false })
    }
}

impl<R: Runtime> Rendezvous<R> for ProcessRendezvous<R> {
    fn meet(&mut self) -> Result<Membership<R>> {
        // Whoever did not come, a process that was stopped perhaps, may not come to its end either.
        self.next_world().inspect_err(|_| self.processes.note_failure())
    }

    fn committed(&mut self) {
        self.run.committed = true;
    }
}

impl<R: Runtime> ProcessRendezvous<R> {
    fn next_world(&mut self) -> Result<Membership<R>> {
        let (begun, most) = (Instant::now(), self.quorum.join_timeout);
        loop {
            let comm = match self.has_met {
                false => self.processes.world(&self.rt)?,
                true => self.processes.recover_within(&self.rt, most.saturating_sub(begun.elapsed()))?,
            };
            self.has_met = true;
            // All that are in it have come to this world: or one has died since, and those that are left come to another.
            let all = match comm.exchange_equal(self.run.to_bytes()) {
                Ok(all) => all,
                Err(error) if is_of_another(&comm, &error) && begun.elapsed() < most => continue,
                Err(error) => return Err(error),
            };
            let run = all.iter().map(Run::from_bytes).fold(self.run, Run::and);
            // What is missing is missing on all of them.
            if let Some(why) = self.quorum.missing(comm.size(), comm.size(), run.before as usize) {
                return Err(Quorum::refused(&why));
            }
            self.run = Run { generation: run.generation + 1, before: comm.size() as u64, ..run };
            return Ok(Membership { comm, generation: run.generation, committed: run.committed, newcomers: 0 });
        }
    }
}

/// Whether those that are left can go on without the process that an error names.
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
        assert_eq!(Run::from_bytes(&few.to_bytes()), few);
    }
}
