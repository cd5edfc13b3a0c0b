//! Optimizers: their formulas, states and schedules.

mod adamw_8bit;
mod bf16_state;
mod capturable;
#[path = "../common/mod.rs"]
mod common;
mod engine;
mod evaluation_weights;
mod extras;
mod goldens;
mod gradients;
mod lbfgs;
mod mup;
mod own;
mod resume;
mod schedules;
mod sums;
