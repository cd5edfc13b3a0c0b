//! Data parallelism, ZeRO and pipelines over NCCL on the host: the tests of `distributed`, by their own source.
#![allow(missing_docs, unused_imports, dead_code)]
#![cfg(feature = "emulate-all")]

extern crate self as distributed;

include!("../../../distributed/tests/all/on_engines.rs");

#[path = "../../../distributed/tests/all/job.rs"]
mod job;
#[path = "../support/start.rs"]
mod start;
