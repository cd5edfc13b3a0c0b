//! The cases of the comparison, on any runtime, and their timing.
#![forbid(unsafe_code)]

pub mod cases;
pub mod timing;
