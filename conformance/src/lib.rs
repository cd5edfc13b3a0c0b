//! What every runtime must get right.
#![forbid(unsafe_code)]

mod caught;
pub mod golden;
