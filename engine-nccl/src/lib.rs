//! Ranks on NVIDIA GPUs: a communicator over NCCL.
//!
//! NCCL moves the data. The rest of the contract of [`comm`] is met by a second communicator of the same ranks, the
//! *control plane*. It consists of threads of one process, or of processes joined by MPI or over TCP. On it,
//! ranks compare their calls, detect failed and absent ranks, split into groups, and exchange host bytes. NCCL itself
//! can do none of this: mismatched calls hang or corrupt memory, and an error has no reason.
//!
//! The library is opened at run time, so building needs no NCCL. `README.md` describes the steps of a call.
#![warn(unreachable_pub)]

mod api;
mod bootstrap;
mod communicator;
#[cfg(feature = "emulate")]
mod emulated;
mod handle;
mod loaded;
mod member;
mod memory;
mod moves;
mod nccl;
mod watch;
mod world;

pub use communicator::NcclCommunicator;
#[cfg(feature = "emulate")]
pub use emulated::BeginCall;
pub use nccl::Nccl;

/// The contract that this engine implements.
pub use comm;
