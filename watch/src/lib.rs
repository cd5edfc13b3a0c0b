//! What people look at while a model trains: [sinks](sink) that records go to, [metrics] that no number of ranks
//! changes, [reports](report), and [timelines](recorder) of what was recorded. The training loop of the crate `train`
//! gives all of it; a loop of one's own can too.
#![forbid(unsafe_code)]

mod escape;
mod json;
pub mod metrics;
pub mod recorder;
pub mod report;
pub mod sink;

pub use sink::{Record, Sink};
