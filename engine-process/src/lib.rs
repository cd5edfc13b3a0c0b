//! Ranks as processes: a communicator over messages between pairs of processes.
//!
//! [`Processes::run`] does for processes what `Ranks::run` does for threads: it passes a communicator to a program.
//! Code above the communicator stays the same. The processes are joined by a [`Transport`], which only sends and
//! receives messages between two of them. [`Tcp`] has a connection between every two, and the crate
//! `weftgrad-engine-mpi` has Open MPI. Collectives are made of such messages. The project's own kernels combine sums in
//! the order of ranks, so results have the same bits as with threads.
//!
//! Ranks compare their calls before any data moves, which costs one small message per call to every other participant.
//! In return, a rank that diverges, fails, leaves or stays away ends the call with an error on every rank. The error
//! names the reason, as with threads. `README.md` in this crate describes the design.
#![warn(unreachable_pub)]

mod communicator;
mod flight;
mod inbox;
mod job;
mod join;
#[cfg(test)]
mod join_tests;
mod launch;
mod memory;
mod message;
mod moves;
mod processes;
mod progress;
mod rendezvous;
mod stream;
mod tags;
mod tcp;
#[cfg(test)]
mod tests;
mod transport;
mod world;

pub use communicator::ProcessCommunicator;
pub use launch::Launch;
pub use processes::Processes;
pub use rendezvous::ProcessRendezvous;
pub use tcp::Tcp;
pub use transport::{Channel, Request, Test, Transport};

/// The contract that this engine implements.
pub use comm;
