//! Everything that must hold of many ranks, in one program: each test file for itself would compile the same kernels again.
#![allow(missing_docs)]

mod checkpoints;
mod collectives;
mod common;
mod data_parallel;
mod faults;
mod pipeline_common;
mod pipeline_faults;
mod pipeline_formulas;
mod pipeline_golden;
mod pipeline_lowering;
mod pipeline_messages;
mod pipeline_mutations;
mod pipeline_refusals;
mod pipeline_run;
mod pipeline_simulation;
mod pipeline_stages;
mod pipeline_text;
mod pipeline_threads;
mod pipeline_train;
mod powersgd;
mod powersgd_training;
mod zero;
