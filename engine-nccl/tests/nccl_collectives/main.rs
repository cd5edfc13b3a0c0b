//! What every engine must do, over NCCL on the host: the tests of `comm`, by their own source; and what is NCCL's alone.
#![allow(missing_docs)]

extern crate self as comm;

include!("../../../comm/tests/support/contract.rs");

mod joined;
mod nccl_engine;
#[allow(unused_imports, reason = "the suite is not its own")]
#[path = "../../../engine-process/tests/support/start.rs"]
mod processes;
#[path = "../support/start.rs"]
mod start;
