//! The engine itself: everything that needs MPI to be there.

mod communicator;
mod flight;
mod job;
mod library;
mod meeting;
mod memory;
mod message;
mod moves;
mod process;
mod progress;
mod recover;
mod rendezvous;
mod stream;
mod world;

pub use communicator::MpiCommunicator;
pub use process::Mpi;
pub use rendezvous::MpiRendezvous;
