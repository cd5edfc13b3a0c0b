//! What the examples share: a progress bar, a picture of the loss, and a clean end on Ctrl-C.
#![forbid(unsafe_code)]

pub mod plot;
pub mod progress;
pub mod stop;
