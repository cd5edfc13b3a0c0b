//! What every engine must do, over NCCL on the host: the tests of `comm`, by their own source; and what is NCCL's alone.
//!
//! `comm` is this program here: all of the crate, with `Ranks` over NCCL in place of its own.
#![allow(missing_docs)]

extern crate self as comm;

pub use engine_nccl::comm::*;
pub use ranks::Ranks;

#[path = "../../../comm/tests/all/collectives.rs"]
mod collectives;
#[path = "../../../comm/tests/all/collectives_types.rs"]
mod collectives_types;
#[path = "../../../comm/tests/all/faults.rs"]
mod faults;
mod nccl_engine;
#[path = "../support/ranks.rs"]
pub mod ranks;
mod shared_folder;
