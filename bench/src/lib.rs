//! The cases of the comparison with other frameworks, on any runtime, and their timing.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod cases;
pub mod timing;
