//! Small kernels, written by hand.

mod arithmetic;
mod checks;
mod control;
mod matrices;
mod memory;
mod parsing;
mod support;
mod tiles;
