//! Only a schedule that was checked over all ranks runs.

use distributed::{
    comm::Comm,
    pipeline::{Pipeline, PipelineOptions, Schedule, Stage},
};
use numcore::{NullRuntime, Result};

type Stages = Vec<(usize, Box<dyn Stage<NullRuntime>>)>;

fn start(comm: &Comm<NullRuntime>, written_by_hand: Schedule, stages: Stages) -> Result<Pipeline<NullRuntime>> {
    Pipeline::new(comm, written_by_hand, stages, None, PipelineOptions::default())
}

fn main() {}
