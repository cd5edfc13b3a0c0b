//! Models of other programs, as modules that compute, train and are saved like any other: ONNX ([`OnnxModel`]).
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod onnx;

pub use onnx::{OnnxInput, OnnxModel, OnnxSize};
