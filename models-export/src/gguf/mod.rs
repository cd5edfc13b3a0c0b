//! Decoders as GGUF files, which llama.cpp and programs built on it read.
//!
//! A model is written only if llama.cpp would compute the same. Options that it does not support (sliding windows of
//! these families, other activations) are an error.

mod blocks;
mod file;
mod metadata;
mod tokenizer;

use std::path::{Path, PathBuf};

use file::{GgufTensor, GgufWriter};
use metadata::metadata;
use models::{Decoder, DecoderConfig, Family, GGUF_TABLE, require_unchanged};
use nn::{ModuleExt, Param};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{PointwiseOps, ViewOps},
};

/// The element type of the matrices in a GGUF file. Norms, biases and learned positions are always `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GgufWeights {
    /// 32-bit floating point.
    F32,
    /// 16-bit IEEE floating point.
    #[default]
    F16,
    /// bfloat16.
    BF16,
    /// 8-bit integers in blocks of 32 with a scale each, 8.5 bits an element. Matrices whose rows are no multiple of 32
    /// elements are `f16`.
    Q8_0,
}

/// The options of a GGUF file.
#[derive(Clone, Debug)]
pub struct GgufOptions {
    /// The element type of matrices.
    pub weights: GgufWeights,
    /// The context that the file states, in tokens; the model's if `None`. It must be within the model's sliding
    /// windows, which llama.cpp does not compute in these families.
    pub context: Option<usize>,
    /// The folder whose `tokenizer.json` and `tokenizer_config.json` are written into the file. llama.cpp needs them to
    /// read and write text.
    pub tokenizer: Option<PathBuf>,
    /// The name of the model in the file.
    pub name: Option<String>,
    /// True on the rank that writes. Where parameters are sharded, all ranks save together, since values are gathered.
    pub writes: bool,
}

impl Default for GgufOptions {
    fn default() -> Self {
        GgufOptions { weights: GgufWeights::default(), context: None, tokenizer: None, name: None, writes: true }
    }
}

/// Writes a model as a GGUF file (version 3), all or nothing. Beyond the model, one weight at a time is in memory.
///
/// # Errors
/// Fails if llama.cpp would compute something else, the tokenizer is of an unsupported kind, or a layer has an adapter.
/// Fails too if a value does not fit the element type, or the file cannot be written.
pub fn save_gguf<R: Runtime>(model: &Decoder<R>, path: impl AsRef<Path>, options: &GgufOptions) -> Result<()> {
    require_unchanged(model)?;
    let config = model.config();
    let mut file = GgufWriter::new(metadata(config, options)?);
    if let Some(folder) = &options.tokenizer {
        file.metadata.extend(tokenizer::tables(folder, config.vocab)?);
    }
    file.tensors.extend(metadata::rope_factors(config));
    for (name, parameter) in model.named_parameters() {
        file.tensors.push(tensor(config, options, &name, parameter)?);
    }
    if options.writes { file.write(path.as_ref()) } else { file.gather() }
}

/// A parameter as a tensor of the file.
fn tensor<'a, R: Runtime>(
    config: &DecoderConfig,
    options: &GgufOptions,
    name: &str,
    parameter: Param<R>,
) -> Result<GgufTensor<'a>> {
    let theirs = GGUF_TABLE.theirs(name).ok_or_else(|| Error::state(name, "has no name in GGUF files"))?.name;
    let shape = parameter.shape();
    let is_matrix = shape.rank() == 2 && name != "embed_positions.weight";
    let columns = shape.last().copied().unwrap_or(1);
    let weights = match options.weights {
        _ if !is_matrix => GgufWeights::F32,
        weights if !columns.is_multiple_of(weights.kind().block()) => GgufWeights::F16,
        weights => weights,
    };
    let heads = pairs(config, name);
    let value = move || {
        let value = parameter.value()?.to_dtype(DType::F32)?;
        heads.map_or(Ok(value.clone()), |heads| interleaved(&value, heads))?.to_vec()
    };
    Ok(GgufTensor { name: theirs, shape: shape.to_vec(), weights, value: Box::new(value) })
}

/// The number of heads of a query or key projection whose rows are reordered; `None` if they are not. In its
/// architecture `llama`, llama.cpp rotates adjacent components of a head together. In others it rotates those half a
/// head from each other, as this project does.
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
