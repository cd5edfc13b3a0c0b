//! Operations above the primitives, against plain loops in `f64` and PyTorch's documented values, on the CPU.
//! Gradients, views and narrow types of the same operations are in the suite.

mod arrange;
mod common;
mod convolutions;
mod errors;
mod fourier;
mod grid_sample;
mod interpolate;
mod pools;
mod scatter;
mod select;
mod unfolded;
