//! Data parallelism, ZeRO, pipelines and checkpoints on ranks that are processes: the tests of `distributed`, by their own source.
//!
//! `distributed` is this program here: all of the crate, with `Ranks` of processes in place of those of `comm`.
#![allow(missing_docs, unused_imports, dead_code)]

extern crate self as distributed;

pub use real_distributed::*;

pub mod comm {
    pub use crate::ranks::Ranks;
    pub use real_distributed::comm::*;
}

#[path = "../../../distributed/tests/all/canonical_order.rs"]
mod canonical_order;
#[path = "../../../distributed/tests/all/checkpoint_common.rs"]
mod checkpoint_common;
#[path = "../../../distributed/tests/all/checkpoints.rs"]
mod checkpoints;
#[path = "../../../distributed/tests/all/common.rs"]
mod common;
#[path = "../../../distributed/tests/all/data_parallel.rs"]
mod data_parallel;
#[path = "../../../distributed/tests/all/data_parallel_unused.rs"]
mod data_parallel_unused;
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
#[path = "../support/ranks.rs"]
pub mod ranks;
#[path = "../../../distributed/tests/all/training.rs"]
mod training;
#[path = "../../../distributed/tests/all/two_trainers.rs"]
mod two_trainers;
#[path = "../../../distributed/tests/all/way.rs"]
mod way;
#[path = "../../../distributed/tests/all/ways.rs"]
mod ways;
#[path = "../../../distributed/tests/all/zero_memory.rs"]
mod zero_memory;
#[path = "../../../distributed/tests/all/zero_stages.rs"]
mod zero_stages;

use crate::comm::engine::{Portable, WireReader, Writer};

impl Portable for common::Trace {
    fn write(&self, to: &mut Writer) {
        self.losses.write(to);
        self.norms.write(to);
        self.weights.write(to);
    }

    fn read(from: &mut WireReader<'_>) -> numcore::Result<Self> {
        let (losses, norms) = (Portable::read(from)?, Portable::read(from)?);
        Ok(common::Trace { losses, norms, weights: Portable::read(from)? })
    }
}

impl Portable for outcome::RunOutcome {
    fn write(&self, to: &mut Writer) {
        self.losses.write(to);
        self.norms.write(to);
        self.pieces.write(to);
    }

    fn read(from: &mut WireReader<'_>) -> numcore::Result<Self> {
        let (losses, norms) = (Portable::read(from)?, Portable::read(from)?);
        Ok(outcome::RunOutcome { losses, norms, pieces: Portable::read(from)? })
    }
}
