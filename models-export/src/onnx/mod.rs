//! Models as ONNX files, which onnxruntime and others compute.
//!
//! A graph is of opset 17, in `f32`, for any batch and any number of tokens. Weights lie in a file beside the graph,
//! since one file of this format holds 2 GiB at most.

mod decoder;
mod graph;
mod layers;
mod vit;

use std::path::Path;

use models::{Decoder, Vit, require_unchanged};
use numcore::{Result, Runtime};

/// The options of an ONNX file.
#[derive(Clone, Copy, Debug)]
pub struct OnnxOptions {
    /// True on the rank that writes. Where parameters are sharded, all ranks save together, since values are gathered.
    pub writes: bool,
}

impl Default for OnnxOptions {
    fn default() -> Self {
        OnnxOptions { writes: true }
    }
}

/// Writes a decoder as an ONNX file, and its weights as `PATH.data` beside it. The graph has the input `input_ids`,
/// `[batch, sequence]` (`i64`), and the output `logits`, `[batch, sequence, V]`, without a cache of keys and values.
///
/// # Errors
/// Fails if a layer has an adapter, the model has mixtures of experts, or a file cannot be written.
pub fn save_onnx_decoder<R: Runtime>(model: &Decoder<R>, path: impl AsRef<Path>, options: &OnnxOptions) -> Result<()> {
    require_unchanged(model)?;
    decoder::graph(model)?.save(path.as_ref(), options.writes)
}

/// Writes a vision transformer as an ONNX file, and its weights as `PATH.data` beside it. The graph has the input
/// `pixel_values`, `[batch, K, H, W]`, and the output `logits`, `[batch, N]`.
///
/// # Errors
/// Fails if a layer has an adapter, or a file cannot be written.
pub fn save_onnx_vit<R: Runtime>(model: &Vit<R>, path: impl AsRef<Path>, options: &OnnxOptions) -> Result<()> {
    require_unchanged(model)?;
    vit::graph(model)?.save(path.as_ref(), options.writes)
}
