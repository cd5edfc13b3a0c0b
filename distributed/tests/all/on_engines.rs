// The tests that run on every engine's ranks, included in the root of an engine's program. There `distributed` is this
// program: all of the crate, with `Ranks` of the engine in place of threads. The program has two modules: `start` starts
// the engine's ranks, `job` is that of the tests.

pub use real_distributed::*;

pub mod comm {
    pub use crate::ranks::Ranks;
    pub use real_distributed::comm::*;
}

mod between;
mod canonical_order;
mod checkpoint_common;
mod common;
mod data_parallel;
mod data_parallel_unused;
mod mixture;
mod outcome;
mod pipeline_common;
mod pipeline_run;
mod pipeline_train;
mod prelude;
#[path = "../../../comm/tests/support/ranks.rs"]
mod ranks;
mod training;
mod way;
mod way_models;
mod ways;
mod zero_memory;
mod zero_stages;
