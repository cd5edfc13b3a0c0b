//! The meetings of processes: all of a job at first, and those that are left whenever some are lost.

use std::{fmt, sync::Arc};

use comm::{Communicator, Membership, Quorum, Rendezvous};
use numcore::{Error, Result, Runtime};

use super::Mpi;

/// What `mpirun --with-ft ulfm` sets for its processes.
const FAULT_TOLERANCE: &str = "OMPI_MCA_mpi_ft_enable";

/// Where the processes of a job meet. A process is lost when it dies, or drops its [`Mpi`]; none can join a job that runs.
pub struct MpiRendezvous<R: Runtime> {
    mpi: Arc<Mpi>,
    rt: R,
    quorum: Quorum,
    generation: u64,
    /// How many ranks the last world had.
    before: usize,
}

impl Mpi {
    /// This process's side of a rendezvous of all processes, which all make. A process that has failed drops its `Mpi` soon, or ends: the others wait for that no longer than
    /// the [`join_timeout`](Quorum::join_timeout), and one that hangs ends the run, since it could come back.
    ///
    /// # Errors
    /// Where the launcher ends all processes when one dies: it must be that of Open MPI 5, started with `--with-ft ulfm`.
    pub fn rendezvous<R: Runtime>(self: &Arc<Self>, rt: R, quorum: Quorum) -> Result<MpiRendezvous<R>> {
        if self.size() > 1 && !std::env::var(FAULT_TOLERANCE).is_ok_and(|value| is_on(&value)) {
            let why = "this launcher ends all processes when one dies, so nobody would be left to meet: start with Open MPI 5 and `mpirun --with-ft ulfm`, or \
                       save checkpoints and start again from the last one, on as many processes as there are then";
            return Err(Error::argument("Mpi::rendezvous", why));
        }
        Ok(MpiRendezvous { mpi: self.clone(), rt, quorum, generation: 0, before: 0 })
    }
}

fn is_on(value: &str) -> bool {
    matches!(value, "1" | "true")
}

impl<R: Runtime> Rendezvous<R> for MpiRendezvous<R> {
    fn meet(&mut self) -> Result<Membership<R>> {
        // Whoever did not come, a process that was stopped perhaps, may not come to its end either.
        self.next_world().inspect_err(|_| self.mpi.note_failure())
    }
}

impl<R: Runtime> MpiRendezvous<R> {
    fn next_world(&mut self) -> Result<Membership<R>> {
        let (generation, join_timeout) = (self.generation, self.quorum.join_timeout);
        let comm = match generation {
            0 => self.mpi.world(&self.rt)?,
            _ => self.mpi.recover_within(&self.rt, join_timeout)?,
        };
        // What is missing is missing on all of them.
        if let Some(why) = self.quorum.missing(comm.size(), comm.size(), self.before) {
            return Err(Quorum::refused(&why));
        }
        (self.generation, self.before) = (generation + 1, comm.size());
        Ok(Membership { comm, generation, committed: generation > 0, newcomers: 0 })
    }
}

impl<R: Runtime> fmt::Debug for MpiRendezvous<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpiRendezvous(world {} of {:?})", self.generation, self.mpi)
    }
}
