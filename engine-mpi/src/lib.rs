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
mod communicator;
#[cfg(feature = "open-mpi")]
mod flight;
#[cfg(feature = "open-mpi")]
mod job;
#[cfg(feature = "open-mpi")]
mod library;
#[cfg(feature = "open-mpi")]
mod meeting;
#[cfg(feature = "open-mpi")]
mod memory;
#[cfg(feature = "open-mpi")]
mod message;
#[cfg(feature = "open-mpi")]
mod moves;
#[cfg(feature = "open-mpi")]
mod plan;
#[cfg(feature = "open-mpi")]
mod process;
#[cfg(feature = "open-mpi")]
mod progress;
#[cfg(feature = "open-mpi")]
mod recover;
#[cfg(feature = "open-mpi")]
mod stream;
#[cfg(feature = "open-mpi")]
mod world;

#[cfg(feature = "open-mpi")]
pub use communicator::MpiCommunicator;
#[cfg(feature = "open-mpi")]
pub use process::Mpi;

/// The contract that this engine implements.
pub use comm;
