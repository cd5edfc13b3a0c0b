//! Models that torch.onnx.export wrote, against onnxruntime and PyTorch.

mod common;
mod values;
