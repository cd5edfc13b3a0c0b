//! The training loop, on one rank and on many, and what people look at while it runs.

mod averaging;
mod balanced;
mod buffers;
mod common;
mod context;
mod control;
mod doors;
mod elastic;
mod elastic_newcomers;
mod elastic_saves;
mod evaluation;
mod experts;
mod failures;
#[path = "../../../data/tests/common/mod.rs"]
mod folder;
mod intervals;
mod kills;
mod local_updates;
mod metrics;
mod order;
mod pipelines;
mod policies;
mod remembered;
mod report;
mod resuming;
mod saving;
mod signals;
mod sinks;
mod tensor;
