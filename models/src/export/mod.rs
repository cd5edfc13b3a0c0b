//! Models in the formats of other programs: GGUF, which llama.cpp reads, and ONNX, which many runtimes do.

mod gguf;
mod onnx;

pub use gguf::{GgufOptions, GgufWeights};
pub use onnx::OnnxOptions;
