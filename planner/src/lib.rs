//! Questions before a run on many ranks. [`verify`]: is the model there the model of one rank, and if not, why?
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod verify;
