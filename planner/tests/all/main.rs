//! Comparisons of plans with one rank: right models raise no alarm, and faults put in by hand are named.

mod common;
mod compared;
mod faults;
mod megatron;
mod mixed;
mod peaks;
mod plans;
mod published;
mod right;
mod search;
mod stages;
mod volumes;
