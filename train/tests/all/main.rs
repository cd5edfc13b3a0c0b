//! The training loop, on one rank and on many.

mod averaging;
mod common;
mod control;
mod doors;
mod evaluation;
mod intervals;
mod kills;
mod policies;
mod resuming;
mod saving;
