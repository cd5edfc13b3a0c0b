//! Kernels against plain loops on the host: operands in every memory layout, every element type, sizes around the edges
//! of tiles and blocks.
//!
//! Bounds are those of a computation in the element type (half precision: in `f32`, rounded once), with sums in any
//! order.

mod convolutions;
mod copies;
mod functions;
mod index;
mod known;
mod matmul;
mod order;
mod outputs;
mod program_layouts;
mod reduce;
mod softmax;
mod windows;

pub(super) use copies::copies;
pub(super) use functions::functions;
pub(super) use index::index;
pub(super) use known::upload;
pub(super) use matmul::matmul;
pub(super) use order::order;
pub(super) use outputs::outputs;
pub(super) use program_layouts::program_layouts;
pub(super) use reduce::reduce;
pub(super) use softmax::softmax;
pub(super) use windows::windows;
