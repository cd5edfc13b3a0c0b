//! Models in the formats of other programs: GGUF for llama.cpp ([`save_gguf`]), and ONNX for many runtimes
//! ([`save_onnx_decoder`], [`save_onnx_vit`]).
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod gguf;
mod onnx;

pub use gguf::{GgufOptions, GgufWeights, save_gguf};
pub use onnx::{OnnxOptions, save_onnx_decoder, save_onnx_vit};
