//! Code shared by the examples: command line, configurations, length of a run, ranks, and text as tokens.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod budget;
pub mod config;
pub mod options;
pub mod prose;
pub mod ranks;
pub mod small;
pub mod text;

/// A value, or the error that ended the program early.
pub type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;
