//! Ranks on NVIDIA GPUs: a communicator over NCCL.
//!
//! NCCL moves the data. Everything else that the contract of [`comm`] asks for comes from a second communicator of the same ranks, the
//! *control plane*, which is threads of one process, or processes that MPI or a shared folder joins: ranks compare their calls there, learn that one failed or
//! stays away, split into groups, and exchange bytes of the host. NCCL itself can do none of this: calls that do not match hang or
//! corrupt memory, and an error has no reason.
//!
//! The library is opened at run time; nothing here needs it to build. See `README.md` for what happens in a call.

mod api;
mod communicator;
#[cfg(feature = "emulate")]
mod emulated;
mod greeting;
mod handle;
mod loaded;
mod memory;
mod moves;
mod nccl;
mod watch;
mod world;

pub use communicator::NcclCommunicator;
pub use nccl::Nccl;

/// The contract that this engine implements.
pub use comm;
