//! Ranks as processes that Open MPI joins: MPI as a [`Transport`](engine_process::Transport) of the engine in [`engine_process`].
//!
//! All that is asked of MPI is messages between two processes; the engine makes collectives of them, so sums are combined in the order of ranks by
//! the project's own kernels, and are the same bits as those of threads.
//!
//! The feature `open-mpi` links the library; without it the crate holds only what needs no MPI.

#[cfg(any(feature = "open-mpi", test))]
mod launched;
#[cfg(feature = "open-mpi")]
mod library;
#[cfg(feature = "open-mpi")]
mod open_mpi;

#[cfg(feature = "open-mpi")]
pub use open_mpi::init;

/// The engine that MPI is a transport of.
pub use engine_process;
