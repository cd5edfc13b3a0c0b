//! Models in the formats of other programs: GGUF for llama.cpp ([`SaveGguf`]), and ONNX for many runtimes
//! ([`SaveOnnx`]).
#![forbid(unsafe_code)]

mod gguf;
mod onnx;

pub use gguf::{GgufOptions, GgufWeights, SaveGguf};
pub use onnx::{OnnxOptions, SaveOnnx};
