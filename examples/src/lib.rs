//! What the examples share: a command line, configurations, how long a run trains, ranks, and text as numbers.
#![forbid(unsafe_code)]

pub mod budget;
pub mod config;
pub mod options;
pub mod prose;
pub mod ranks;
pub mod text;

/// Something, or what ended the program early.
pub type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;
