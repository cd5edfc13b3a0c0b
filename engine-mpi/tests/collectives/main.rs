//! What every engine must do, on ranks that are processes: the tests of `comm`, by their own source.
//!
//! `comm` is this program here: all of the crate, with `Ranks` of processes in place of its own.
#![allow(missing_docs)]

extern crate self as comm;

pub use engine_mpi::engine_process::comm::*;
pub use ranks::Ranks;

#[path = "../../../comm/tests/all/collectives.rs"]
mod collectives;
#[path = "../../../comm/tests/all/collectives_types.rs"]
mod collectives_types;
#[path = "../../../comm/tests/all/faults.rs"]
mod faults;
#[path = "../../../comm/tests/all/in_order.rs"]
mod in_order;
#[allow(dead_code, reason = "other suites use the rest")]
#[path = "../support/ranks.rs"]
pub mod ranks;
