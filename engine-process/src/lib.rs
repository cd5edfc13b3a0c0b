//! Ranks as processes: a communicator over messages between two of them.
//!
//! [`Processes::run`] is for processes what `Ranks::run` is for threads: a program is given a communicator, and nothing above it changes. What
//! joins the processes is a [`Transport`], of which nothing is asked but messages between two: [`SharedFolder`] needs nothing but files, and
//! the crate `weftgrad-engine-mpi` has Open MPI. Collectives are made of such messages, so sums are combined in the order of ranks by
//! the project's own kernels, and are the same bits as those of threads.
//!
//! Ranks compare what they call before any data moves. So each call costs a small message to every rank that takes part; for that, ranks that
//! diverge, fail, leave or stay away end as an error with the reason on every rank, as with threads. See `README.md` beside.

mod communicator;
mod end;
mod flight;
mod folder;
mod job;
mod launch;
mod meeting;
mod memory;
mod message;
mod moves;
mod processes;
mod progress;
mod recover;
mod rendezvous;
mod stream;
mod tags;
#[cfg(test)]
mod tests;
mod transport;
mod world;

pub use communicator::ProcessCommunicator;
pub use folder::SharedFolder;
pub use launch::Launch;
pub use processes::Processes;
pub use rendezvous::ProcessRendezvous;
pub use transport::{Channel, Request, Test, Transport};

/// The contract that this engine implements.
pub use comm;
