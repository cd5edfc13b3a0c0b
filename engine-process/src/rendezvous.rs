//! The rendezvous of processes: all of a job at first, then the survivors after each loss.

use std::{fmt, sync::Arc, time::Instant};

use comm::{Collectives, Comm, Communicator, Membership, Quorum, Rendezvous};
use numcore::{Error, ErrorKind, Result, Runtime};

use super::Processes;

/// A rendezvous of the processes of a job. A process is lost when it dies or drops its [`Processes`]; no process can
/// join a running job.
pub struct ProcessRendezvous<R: Runtime> {
    processes: Arc<Processes>,
    rt: R,
    quorum: Quorum,
    run: Run,
    /// True if this process has been in a world already.
    has_joined: bool,
}

/// The state of the run that processes compare at a rendezvous. A process that was in one more world, in which another
/// died, has the more recent state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Run {
    /// The number of the next world.
    generation: u64,
    /// The number of ranks of the last world.
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
    /// [`join_timeout`](Quorum::join_timeout). A process that hangs ends the run, since it could come back. A process
    /// that dies during the rendezvous is left out too: the survivors try again until the
    /// [`join_timeout`](Quorum::join_timeout) has passed.
    ///
    /// # Errors
    /// An error if the transport does not report deaths to the survivors, or a death ends them. Over MPI the launcher
    /// must be that of Open MPI 5, started with `--with-ft ulfm`.
    pub fn rendezvous<R: Runtime>(self: &Arc<Self>, rt: R, quorum: Quorum) -> Result<ProcessRendezvous<R>> {
        if let Some(why) = self.no_recovery.as_ref().filter(|_| self.size() > 1) {
            return Err(Error::unsupported("Processes::rendezvous", why.clone()));
        }
        Ok(ProcessRendezvous { processes: self.clone(), rt, quorum, run: Run::default(), has_joined: false })
    }
}

impl<R: Runtime> Rendezvous<R> for ProcessRendezvous<R> {
    fn next_world(&mut self) -> Result<Membership<R>> {
        // A process that did not come, perhaps because it was stopped, may not end either.
        self.form_world().inspect_err(|_| self.processes.note_failure())
    }

    fn committed(&mut self) {
        self.run.committed = true;
    }
}

impl<R: Runtime> ProcessRendezvous<R> {
    fn form_world(&mut self) -> Result<Membership<R>> {
        let (begun, most) = (Instant::now(), self.quorum.join_timeout);
        loop {
            let comm = match self.has_joined {
                false => self.processes.world(&self.rt)?,
                true => self.processes.recover_within(&self.rt, most.saturating_sub(begun.elapsed()))?,
            };
            self.has_joined = true;
            // Either all members have entered this world, or one has died since and the survivors enter another.
            let all = match comm.exchange_equal(self.run.to_bytes()) {
                Ok(all) => all,
                Err(error) if is_of_another(&comm, &error) && begun.elapsed() < most => continue,
                Err(error) => return Err(error),
            };
            let run = all.iter().map(Run::from_bytes).fold(self.run, Run::and);
            // The quorum is missed on all survivors alike.
            if let Some(why) = self.quorum.missing(comm.size(), comm.size(), run.before as usize) {
                return Err(Quorum::refused(&why));
            }
            self.run = Run { generation: run.generation + 1, before: comm.size() as u64, ..run };
            return Ok(Membership { comm, generation: run.generation, committed: run.committed, newcomers: 0 });
        }
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
        assert_eq!(Run::from_bytes(&few.to_bytes()), few);
    }
}
