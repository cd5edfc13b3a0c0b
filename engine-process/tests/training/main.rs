//! Strategies, pipelines, checkpoints and drawn ways to train over TCP: the tests of `distributed`, by their own source.
#![allow(missing_docs, unused_imports, dead_code)]

extern crate self as distributed;

include!("../../../distributed/tests/all/on_engines.rs");

#[path = "../../../distributed/tests/all/checkpoints.rs"]
mod checkpoints;
#[path = "../../../distributed/tests/all/job.rs"]
mod job;
#[path = "../../../distributed/tests/all/matrix.rs"]
mod matrix;
#[path = "../support/start.rs"]
mod start;
#[path = "../../../distributed/tests/all/two_trainers.rs"]
mod two_trainers;
