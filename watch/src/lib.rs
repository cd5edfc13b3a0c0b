//! Displays of a model's training: [sinks](sink) that records go to, [metrics] that are independent of the number of
//! ranks, [reports](report), and [timelines](recorder) of recordings. The training loop of the crate `train` fills all
//! of them; a custom loop can too. With the feature `terminal`, the program `weftgrad-watch` shows runs in a terminal.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod escape;
mod json;
pub mod metrics;
pub mod recorder;
pub mod report;
#[cfg(feature = "terminal")]
pub mod screen;
pub mod sink;

pub use sink::{Record, Sink};
