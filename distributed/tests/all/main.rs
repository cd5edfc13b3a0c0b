//! Everything that must hold of many ranks, in one program: each test file for itself would compile the same kernels again.
#![allow(missing_docs)]

mod checkpoint_common;
mod checkpoint_faults;
mod checkpoints;
mod collectives;
mod common;
mod data_parallel;
mod data_parallel_unused;
mod faults;
mod pipeline_checkpoints;
mod pipeline_common;
mod pipeline_evaluation;
mod pipeline_faults;
mod pipeline_formulas;
mod pipeline_golden;
mod pipeline_hooks;
mod pipeline_lowering;
mod pipeline_memory;
mod pipeline_messages;
mod pipeline_mutations;
mod pipeline_products;
mod pipeline_refusals;
mod pipeline_run;
mod pipeline_simulation;
mod pipeline_staged;
mod pipeline_stages;
mod pipeline_text;
mod pipeline_threads;
mod pipeline_train;
mod pipeline_values;
mod powersgd;
mod powersgd_training;
mod slow_links;
mod zero;
mod zero_memory;
mod zero_offload;
