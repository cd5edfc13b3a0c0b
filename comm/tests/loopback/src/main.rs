//! A third engine, over files: it shows that the contract can be implemented from outside, and that the tests of `comm` hold it to that.
//!
//! A rank writes what it calls and all it contributes to a file for each rank that takes part, waits for theirs, and computes its result by
//! itself. Slow, and simple: `cargo test --manifest-path comm/tests/loopback/Cargo.toml`.
#![cfg_attr(not(test), allow(unused))]

extern crate self as comm;

pub use ranks::Ranks;
pub use real_comm::*;

mod files;
mod ranks;

#[cfg(test)]
#[path = "../../all/collectives.rs"]
mod collectives;
#[cfg(test)]
#[path = "../../all/collectives_types.rs"]
mod collectives_types;
#[cfg(test)]
#[path = "../../all/faults.rs"]
mod faults;

fn main() {}
