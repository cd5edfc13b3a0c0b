//! What every engine must do, on ranks that are processes: the tests of `comm`, by their own source.
#![allow(missing_docs)]

extern crate self as comm;

include!("../../../comm/tests/support/contract.rs");

#[path = "../../../comm/tests/all/deadlines.rs"]
mod deadlines;

#[allow(dead_code, reason = "other suites use the rest")]
#[path = "../support/start.rs"]
mod start;
