//! The callbacks there are.

mod checkpoints;
mod early_stop;
mod evaluate;
mod interrupt;
mod monitor;
mod writer;

pub use checkpoints::Checkpoints;
pub use early_stop::EarlyStop;
pub use evaluate::Evaluate;
pub use monitor::Monitor;
