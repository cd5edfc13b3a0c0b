//! PTX on the host: kernels as NVIDIA's compiler gives them, run by an interpreter that checks every access.
//!
//! [`PtxModule::parse`] decodes the text of a module. An opcode, a modifier or a directive that it does not know is an
//! error with its line. [`PtxKernel::launch`] runs a grid over memory that a caller lends as a [`LaunchMemory`].
//!
//! A warp is the unit of execution: each decoded instruction is carried out for its 32 lanes under a mask of active
//! lanes. Every lane has a place in the code; those at the smallest place go on, so that lanes which diverge join again
//! without an analysis of the control flow. The warps of a block run one after another, each until it waits at a barrier
//! or ends.
//!
//! # Checks
//!
//! Each of these ends the launch with a [`KernelFault`] that names the kernel, the line, the threads and the address:
//!
//! - an access outside of live memory, of shared memory or of parameters, or one that is not aligned to its size;
//! - a race: two accesses of one element of shared or global memory, one of them a write, by threads that no barrier
//!   orders, or by different blocks, unless both are atomic;
//! - a read of shared memory that its block has not written, and any access of the destination of an asynchronous copy
//!   before the copying thread has waited for it;
//! - a product of a warpgroup (`wgmma`) without a fence of registers since the last wait, or without a fence of the
//!   writes to shared memory, or that its warp has not waited for at its end; the result is NaN until then;
//! - lanes that are absent where an instruction needs the whole warp, and threads that end before a barrier;
//! - a launch whose arguments or threads differ from the kernel's declarations.
//!
//! The interpreter does not model weak memory, the rounding of sums inside of tensor cores (they are sums in `f64`,
//! rounded once), nor the approximate functions' last bits.
#![forbid(unsafe_code)]

mod compute;
mod declarations;
mod decode;
mod error;
mod half;
mod instruction;
mod kernel;
mod module;
mod registers;
mod run;
mod text;
mod variable;

pub use error::{FaultKind, KernelFault, LaunchError, PtxError, Space};
pub use kernel::{Parameter, PtxKernel};
pub use module::PtxModule;
pub use run::{LaunchGrid, LaunchMemory, MemoryRegion, Statistics};
