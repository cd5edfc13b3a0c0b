//! The tape: what is recorded, what flows back, what is kept.

mod anomaly;
mod autocast;
mod budgets;
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod deferred;
mod ends;
mod graph;
mod higher;
mod indexing;
mod observe;
mod operators;
mod order;
mod overlap;
mod recomputed;
mod residency;
mod slots;
mod tangents;
mod threads;
