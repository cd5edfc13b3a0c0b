//! Ranks as processes that Open MPI joins: MPI as a [`Transport`](engine_process::Transport) of the engine in
//! [`engine_process`].
//!
//! MPI only carries messages between two processes; the engine makes collectives of them. So the project's own kernels
//! combine sums in the order of ranks, with the bits that threads give.
//!
//! The feature `open-mpi` links the library. Without it the crate contains only the parts that need no MPI.
#![warn(unreachable_pub)]

#[cfg(any(feature = "open-mpi", test))]
mod launched;
#[cfg(feature = "open-mpi")]
mod library;
#[cfg(feature = "open-mpi")]
mod open_mpi;

#[cfg(feature = "open-mpi")]
pub use open_mpi::init;

/// The engine whose transport MPI is.
pub use engine_process;
