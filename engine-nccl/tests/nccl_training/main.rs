//! Data parallelism, ZeRO and pipelines over NCCL on the host: the tests of `distributed`, by their own source.
//!
//! `distributed` is this program here: all of the crate, with `Ranks` over NCCL in place of those of `comm`.
#![allow(missing_docs, unused_imports, dead_code)]
#![cfg(feature = "emulate-all")]

extern crate self as distributed;

pub use real_distributed::*;

pub mod comm {
    pub use crate::ranks::Ranks;
    pub use real_distributed::comm::*;
}

#[path = "../../../distributed/tests/all/checkpoint_common.rs"]
mod checkpoint_common;
#[path = "../../../distributed/tests/all/common.rs"]
mod common;
#[path = "../../../distributed/tests/all/data_parallel.rs"]
mod data_parallel;
#[path = "../../../distributed/tests/all/data_parallel_unused.rs"]
mod data_parallel_unused;
#[path = "../../../distributed/tests/all/job.rs"]
mod job;
#[path = "../../../distributed/tests/all/mixture.rs"]
mod mixture;
#[path = "../../../distributed/tests/all/outcome.rs"]
mod outcome;
#[path = "../../../distributed/tests/all/pipeline_common.rs"]
mod pipeline_common;
#[path = "../../../distributed/tests/all/pipeline_run.rs"]
mod pipeline_run;
#[path = "../../../distributed/tests/all/pipeline_train.rs"]
mod pipeline_train;
#[path = "../../../distributed/tests/all/prelude.rs"]
mod prelude;
#[allow(dead_code, reason = "other suites use the rest")]
#[path = "../support/ranks.rs"]
pub mod ranks;
#[path = "../../../distributed/tests/all/training.rs"]
mod training;
#[path = "../../../distributed/tests/all/way.rs"]
mod way;
#[path = "../../../distributed/tests/all/ways.rs"]
mod ways;
#[path = "../../../distributed/tests/all/zero_memory.rs"]
mod zero_memory;
#[path = "../../../distributed/tests/all/zero_stages.rs"]
mod zero_stages;
