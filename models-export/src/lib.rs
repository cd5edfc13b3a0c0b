//! Models in the formats of other programs: GGUF, which llama.cpp reads ([`SaveGguf`]), and ONNX, which many runtimes
//! do ([`SaveOnnx`]).
#![forbid(unsafe_code)]

mod gguf;
mod onnx;

pub use gguf::{GgufOptions, GgufWeights, SaveGguf};
pub use onnx::{OnnxOptions, SaveOnnx};
