//! Where the ranks of an example are: threads of this process, or processes that `mpirun` has started.

use std::sync::Arc;

use clap::{Args, ValueEnum};
use weftgrad::{
    AnyRuntime, Result,
    distributed::comm::{Comm, NoOpCommunicator, Ranks},
};

use crate::{Outcome, options::OnRanks};

/// What joins the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes, under `mpirun` (a build with the feature `mpi`).
    Mpi,
}

/// How many ranks an example has, and where they are.
#[derive(Args, Clone, Copy, Debug)]
pub struct Joined {
    /// What joins the ranks: with mpi, there are as many as mpirun has started.
    #[arg(long, value_enum, default_value_t)]
    pub engine: Engine,
    #[command(flatten)]
    on: OnRanks,
}

impl Joined {
    /// The ranks, of which there are `size` unless a launcher says how many.
    pub fn ranks(&self, size: usize) -> Outcome<RanksHere> {
        let kind = match self.engine {
            Engine::Threads if size == 1 => Kind::One,
            Engine::Threads => Kind::Threads(Ranks::new(size)),
            #[cfg(feature = "mpi")]
            Engine::Mpi => Kind::Mpi(weftgrad::mpi::Mpi::init()?),
            #[cfg(not(feature = "mpi"))]
            Engine::Mpi => return Err("--engine mpi needs a build with `--features mpi`, and Open MPI".into()),
        };
        Ok(RanksHere { kind, on: self.on })
    }

    /// The runtime of a rank of this process.
    pub fn open(&self) -> Result<AnyRuntime> {
        self.on.open(0)
    }
}

/// The ranks of a program, as this process sees them.
#[derive(Debug)]
pub struct RanksHere {
    kind: Kind,
    on: OnRanks,
}

#[derive(Debug)]
enum Kind {
    /// A world of one, which needs no thread of its own.
    One,
    Threads(Ranks),
    #[cfg(feature = "mpi")]
    Mpi(weftgrad::mpi::Mpi),
}

impl RanksHere {
    /// How many ranks there are.
    pub fn size(&self) -> usize {
        match &self.kind {
            Kind::One => 1,
            Kind::Threads(ranks) => ranks.size(),
            #[cfg(feature = "mpi")]
            Kind::Mpi(mpi) => mpi.size(),
        }
    }

    /// Whether this process has rank 0: what is said once, it says.
    pub fn leads(&self) -> bool {
        match &self.kind {
            Kind::One | Kind::Threads(_) => true,
            #[cfg(feature = "mpi")]
            Kind::Mpi(mpi) => mpi.rank() == 0,
        }
    }

    /// Runs a program on every rank: what the lowest rank of this process returns.
    pub fn run<T: Send>(&self, program: impl Fn(Comm<AnyRuntime>) -> Result<T> + Sync) -> Result<T> {
        match &self.kind {
            Kind::One => program(Arc::new(NoOpCommunicator::new(&self.on.open(0)?))),
            Kind::Threads(ranks) => Ok(ranks.run(|_| self.on.open(0), program)?.swap_remove(0)),
            #[cfg(feature = "mpi")]
            Kind::Mpi(mpi) => mpi.run(|local_rank| self.on.open(local_rank), program),
        }
    }
}
