//! What the examples share: a command line, configurations, how long a run trains, a progress bar, a picture of the loss, text as
//! numbers, and a clean end on Ctrl-C.
#![forbid(unsafe_code)]

pub mod budget;
pub mod config;
pub mod options;
pub mod plot;
pub mod progress;
pub mod prose;
pub mod ranks;
pub mod stop;
pub mod text;

/// Something, or what ended the program early.
pub type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;
