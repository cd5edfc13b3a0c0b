//! Models that torch.onnx.export wrote, against onnxruntime and PyTorch.

mod common;
mod exported;
mod graphs;
mod malformed;
mod recorded;
mod training;
mod values;
