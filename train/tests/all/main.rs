//! The training loop, on one rank and on many.

mod common;
mod control;
mod evaluation;
mod intervals;
mod resuming;
mod saving;
