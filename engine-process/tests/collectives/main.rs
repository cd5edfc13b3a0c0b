//! The contract of engines, on ranks that TCP joins: the tests of `comm`, by their own source.
#![allow(missing_docs)]

extern crate self as comm;

include!("../../../comm/tests/support/contract.rs");

#[path = "../../../comm/tests/all/deadlines.rs"]
mod deadlines;

#[path = "../support/start.rs"]
mod start;
