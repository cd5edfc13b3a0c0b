//! Decoders as GGUF files, which llama.cpp and what is built on it read.
//!
//! A model is written only if llama.cpp would compute what is computed here. What it leaves out (sliding windows of these families, other
//! activations) is an error.

mod blocks;
mod file;
mod metadata;
mod table;
mod tokenizer;

use std::path::{Path, PathBuf};

use file::{GgufFile, GgufTensor};
use metadata::metadata;
use models::{Decoder, DecoderConfig, Family, require_no_adapters};
use nn::{ModuleExt, Param};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{PointwiseOps, ViewOps},
};
use table::GGUF;

/// The element type of the matrices in a GGUF file. Norms, biases and learned positions are `f32` in all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GgufWeights {
    /// 32-bit floating point.
    F32,
    /// 16-bit IEEE floating point.
    #[default]
    F16,
    /// bfloat16.
    BF16,
    /// 8-bit integers in blocks of 32 with a scale each, 8.5 bits an element. Matrices whose rows are no multiple of 32 elements are `f16`.
    Q8_0,
}

/// How a GGUF file is written.
#[derive(Clone, Debug)]
pub struct GgufOptions {
    /// The element type of matrices.
    pub weights: GgufWeights,
    /// The context the file states, if another than the model's. Where the model has sliding windows, it must be within them: llama.cpp computes
    /// these families without.
    pub context: Option<usize>,
    /// The folder whose `tokenizer.json` and `tokenizer_config.json` are written into the file. llama.cpp needs them to read and write text.
    pub tokenizer: Option<PathBuf>,
    /// The name of the model in the file.
    pub name: Option<String>,
    /// Whether this rank writes. Where parameters are sharded, all ranks save together, since values are gathered, and one of them writes.
    pub writes: bool,
}

impl Default for GgufOptions {
    fn default() -> Self {
        GgufOptions { weights: GgufWeights::default(), context: None, tokenizer: None, name: None, writes: true }
    }
}

/// Saving as a GGUF file.
pub trait SaveGguf {
    /// Writes the model as a GGUF file (version 3), all or nothing. One weight at a time is in memory beyond the model.
    ///
    /// # Errors
    /// If llama.cpp would compute something else, the tokenizer is of a kind that is not known here, a layer has an adapter, a value does not fit
    /// the element type, or the file cannot be written.
    fn save_gguf(&self, path: impl AsRef<Path>, options: &GgufOptions) -> Result<()>;
}

impl<R: Runtime> SaveGguf for Decoder<R> {
    fn save_gguf(&self, path: impl AsRef<Path>, options: &GgufOptions) -> Result<()> {
        require_no_adapters(self)?;
        let config = self.config();
        let mut file = GgufFile::new(metadata(config, options)?);
        if let Some(folder) = &options.tokenizer {
            file.metadata.extend(tokenizer::tables(folder, config.vocab)?);
        }
        file.tensors.extend(metadata::rope_factors(config));
        for (name, parameter) in self.named_parameters() {
            file.tensors.push(tensor(config, options, &name, parameter)?);
        }
        if options.writes { file.write(path.as_ref()) } else { file.gather() }
    }
}

/// A parameter as a tensor of the file.
fn tensor<'a, R: Runtime>(
    config: &DecoderConfig,
    options: &GgufOptions,
    name: &str,
    parameter: Param<R>,
) -> Result<GgufTensor<'a>> {
    let theirs = GGUF.theirs(name).ok_or_else(|| Error::state(name, "has no name in GGUF files"))?.name;
    let shape = parameter.shape();
    let is_matrix = shape.rank() == 2 && name != "embed_positions.weight";
    let columns = shape.last().copied().unwrap_or(1);
    let weights = match options.weights {
        _ if !is_matrix => GgufWeights::F32,
        GgufWeights::Q8_0 if !columns.is_multiple_of(blocks::BLOCK) => GgufWeights::F16,
        weights => weights,
    };
    let heads = pairs(config, name);
    let value = move || {
        let value = parameter.value()?.to_dtype(DType::F32)?;
        heads.map_or(Ok(value.clone()), |heads| interleaved(&value, heads))?.to_vec()
    };
    Ok(GgufTensor { name: theirs, shape: shape.to_vec(), weights, value: Box::new(value) })
}

/// The number of heads of a parameter whose rotated components are in another order there: llama.cpp rotates the adjacent components of a head
/// in its architecture `llama`, and those half a head apart in the others.
fn pairs(config: &DecoderConfig, name: &str) -> Option<usize> {
    let adjacent = matches!(config.family, Family::Llama | Family::Mistral);
    let is = |module: &str| name.contains(&format!(".{module}."));
    match adjacent {
        true if is("q_proj") => Some(config.heads),
        true if is("k_proj") => Some(config.kv_heads),
        _ => None,
    }
}

/// The rows of a weight or bias with the two halves of each head interleaved.
fn interleaved<R: Runtime>(value: &Tensor<R>, heads: usize) -> Result<Tensor<R>> {
    let shape = *value.shape();
    let columns: usize = shape[1..].iter().product();
    let halves = value.reshape([heads, 2, shape[0] / heads / 2, columns])?;
    halves.transpose(1, 2)?.contiguous()?.reshape(shape)
}
