//! Ranks as processes: a communicator over Open MPI.
//!
//! `Mpi::run` is for processes what `Ranks::run` is for threads: a program is given a communicator, and nothing above it changes. All
//! that is asked of MPI is messages between two processes; collectives are made of them, so sums are combined in the order of ranks by
//! the project's own kernels, and are the same bits as those of threads.
//!
//! Ranks compare what they call before any data moves. So each call costs a small message to every rank that takes part; for that, ranks that
//! diverge, fail, leave or stay away end as an error with the reason on every rank, as with threads. See `README.md` beside.
//!
//! The feature `open-mpi` links the library; without it the crate holds only what needs no MPI.

mod launch;

pub use launch::Launch;

#[cfg(feature = "open-mpi")]
mod open_mpi;

#[cfg(feature = "open-mpi")]
pub use open_mpi::{Mpi, MpiCommunicator, MpiRendezvous};

/// The contract that this engine implements.
pub use comm;
