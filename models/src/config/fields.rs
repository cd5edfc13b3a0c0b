//! The fields of a `config.json`: those that are read, those that change nothing, and no others.

use std::{cell::RefCell, collections::BTreeSet, fs, ops::Deref, path::Path, sync::Arc};

use data::gguf::GgufFile;
use nn::Activation;
use numcore::{Error, Result, Within};
use serde_json::Value;

use super::{gguf::config_fields, is_generation_field};
use crate::files::{JsonObject, Weights, is_empty};

/// Fields of transformers' configurations that do not change what a model computes. They are names, tokens, training,
/// and fields of encoders or of encoder-decoders alone. Fields of generation are harmless too.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_flash_attn_2_enabled",
    "_model_name_or_path",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "attn_pdrop",
    "auto_map",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cls_token_id",
    "directionality",
    "dropout",
    "dtype",
    "embd_pdrop",
    "encoder_stride",
    "experts_implementation",
    "finetuning_task",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "mask_token_id",
    "model_type",
    "n_ctx",
    "n_special",
    "name_or_path",
    "output_past",
    "pooler_act",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_output_size",
    "pooler_size_per_head",
    "pooler_type",
    "predict_special_tokens",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "qa_dropout",
    "resid_pdrop",
    "return_dict",
    "sep_token_id",
    "seq_classif_dropout",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "tie_last_hidden_states",
    "tie_weights_",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_return_dict",
];

/// The largest size of a model: the product of two such sizes still fits a `usize`.
const LARGEST: usize = i32::MAX as usize;

/// Checks that a model's sizes are at most `LARGEST`, so that products of sizes do not overflow.
///
/// # Errors
/// Fails with the first size that is larger.
pub(crate) fn check_sizes(model: &'static str, sizes: &[(&'static str, usize)]) -> Result<()> {
    let Some((field, size)) = sizes.iter().find(|(_, size)| *size > LARGEST) else { return Ok(()) };
    Err(Error::config(
        model,
        field,
        format!("`{field}` is {size}, which is larger than any model's: the most is {LARGEST}"),
    ))
}

/// Fields that change nothing where they are false. Every other field must be read or harmless whatever its value,
/// since `false` may be the value that changes the model.
const OFF: &[&str] = &[
    "add_cross_attention",
    "attention_bias",
    "is_decoder",
    "is_encoder_decoder",
    "lm_head_bias",
    "mlp_bias",
    "rope_interleaved",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "use_bfloat16",
    "use_mrope",
    "use_sliding_window",
];

/// A `config.json` that records which fields were read. A field that was not read, and is not known to be harmless, is
/// an error in `finish`: it could change what the model computes.
#[derive(Debug)]
pub struct ConfigFields {
    object: JsonObject,
    read: RefCell<BTreeSet<&'static str>>,
    /// The weights next to the fields, if they are at hand.
    weights: Option<Arc<Weights>>,
}

impl Deref for ConfigFields {
    type Target = JsonObject;

    fn deref(&self) -> &JsonObject {
        &self.object
    }
}

impl ConfigFields {
    /// Reads the `config.json` in a folder, or the fields that it would have of a GGUF file's model.
    ///
    /// # Errors
    /// Fails if there is none, or it is longer than 64 MiB or holds no JSON object. Of GGUF, fails if the architecture
    /// is not known, or a key is missing, malformed, or unknown.
    #[track_caller]
    pub fn open(folder: &Path) -> Result<Self> {
        if GgufFile::is_at(folder) {
            return config_fields(&GgufFile::open(folder).at_caller()?).map(Self::of).at_caller();
        }
        let path = folder.join("config.json");
        if folder.is_dir() && !path.is_file() {
            let is_gguf = |entry: std::io::Result<fs::DirEntry>| {
                entry.is_ok_and(|entry| entry.path().extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")))
            };
            let why = match fs::read_dir(folder).is_ok_and(|mut entries| entries.any(is_gguf)) {
                true => "there is no config.json, but a GGUF file: give its path",
                false => "there is no config.json: it is no model's folder",
            };
            return Err(Error::format(folder.display().to_string(), why)).at_caller();
        }
        JsonObject::open(&path).map(Self::of)
    }

    /// Wraps fields that are in memory.
    pub fn of(object: JsonObject) -> Self {
        ConfigFields { object, read: RefCell::default(), weights: None }
    }

    /// Adds the weights, for what no field says.
    pub(crate) fn with_weights(self, weights: &Arc<Weights>) -> Self {
        ConfigFields { weights: Some(weights.clone()), ..self }
    }

    /// The weights next to these fields, if they are at hand.
    pub(crate) fn weights(&self) -> Option<&Weights> {
        self.weights.as_deref()
    }

    /// Tells whether a field is present, even if null.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.fields().contains_key(name)
    }

    /// A count, or `default` if absent.
    #[track_caller]
    pub fn size_or(&self, name: &'static str, default: usize) -> Result<usize> {
        Ok(self.maybe_size(name)?.unwrap_or(default))
    }

    /// A count that may be absent.
    #[track_caller]
    pub fn maybe_size(&self, name: &'static str) -> Result<Option<usize>> {
        match self.count(self.known(name))? {
            Some(size) if size > LARGEST => {
                Err(self
                    .wrong(name, format_args!("is {size}, which is larger than any model's: the most is {LARGEST}")))
                .at_caller()
            }
            size => Ok(size),
        }
    }

    /// Checks that a second name of a size, where it is given, says the same.
    pub(crate) fn also(&self, name: &'static str, first: &str, size: usize) -> Result<()> {
        match self.maybe_size(name)? {
            Some(other) if other != size => {
                Err(self.wrong(name, format_args!("is {other}, and `{first}` says {size}: remove the wrong one")))
            }
            _ => Ok(()),
        }
    }

    /// The side of a square in pixels, or `default`: a number, or two equal ones.
    pub(crate) fn side_or(&self, name: &'static str, default: usize) -> Result<usize> {
        match self.get(name).and_then(Value::as_array).map(Vec::as_slice) {
            Some([height, width]) if height == width => {
                let side = height.as_u64().filter(|&side| side <= LARGEST as u64);
                self.known(name);
                side.map(|side| side as usize).ok_or_else(|| self.wrong(name, "is no square of pixels"))
            }
            _ => self.size_or(name, default),
        }
    }

    /// The number of layers, or `default`; at most 10 000. A wrong number would take memory before weights are found
    /// missing.
    #[track_caller]
    pub fn layers_or(&self, name: &'static str, default: usize) -> Result<usize> {
        const MOST: usize = 10_000;
        match self.count(self.known(name))?.unwrap_or(default) {
            layers if layers <= MOST => Ok(layers),
            layers => Err(self.wrong(name, format_args!("is {layers}; no model has more than {MOST}"))).at_caller(),
        }
    }

    /// The index of a row in a table of `rows` rows, if present. Negative numbers count from the end, as in PyTorch.
    #[track_caller]
    pub fn row(&self, name: &'static str, rows: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(self.known(name)) else { return Ok(None) };
        let from_end = |row: i64| if row < 0 { row.saturating_add_unsigned(rows as u64) } else { row };
        let row = value.as_i64().and_then(|row| usize::try_from(from_end(row)).ok()).filter(|&row| row < rows);
        row.map(Some)
            .ok_or_else(|| self.wrong(name, format_args!("is {value}, and there are {rows} tokens")))
            .at_caller()
    }

    /// A number, or `default` if absent.
    #[track_caller]
    pub fn number_or(&self, name: &'static str, default: f64) -> Result<f64> {
        Ok(self.maybe_number(name)?.unwrap_or(default))
    }

    /// A number that may be absent.
    #[track_caller]
    pub fn maybe_number(&self, name: &'static str) -> Result<Option<f64>> {
        self.number(self.known(name))
    }

    /// A boolean, or `default` if absent.
    #[track_caller]
    pub fn flag_or(&self, name: &'static str, default: bool) -> Result<bool> {
        Ok(self.flag(self.known(name))?.unwrap_or(default))
    }

    /// A string, or `default` if absent.
    #[track_caller]
    pub fn text_or<'a>(&'a self, name: &'static str, default: &'a str) -> Result<&'a str> {
        Ok(self.text(self.known(name))?.unwrap_or(default))
    }

    /// Leaves fields unread that change nothing in this model, whatever they are.
    pub(crate) fn leave(&self, names: &[&'static str]) {
        self.read.borrow_mut().extend(names);
    }

    /// An object, if present.
    #[track_caller]
    pub fn part(&self, name: &'static str) -> Result<Option<JsonObject>> {
        self.object.object(self.known(name))
    }

    /// A list of counts, if present.
    #[track_caller]
    pub fn sizes(&self, name: &'static str) -> Result<Option<Vec<usize>>> {
        self.object.counts(self.known(name))
    }

    /// A list of strings, if present.
    #[track_caller]
    pub fn list(&self, name: &'static str) -> Result<Option<Vec<&str>>> {
        self.object.texts(self.known(name))
    }

    /// An activation by transformers' name, or `default` if absent.
    #[track_caller]
    pub fn activation(&self, name: &'static str, default: Activation) -> Result<Activation> {
        Ok(match self.text(self.known(name))? {
            None => default,
            Some("relu") => Activation::Relu,
            Some("gelu") => Activation::Gelu,
            Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Activation::GeluTanh,
            Some("silu" | "swish") => Activation::Silu,
            Some("quick_gelu") => Activation::QuickGelu,
            Some(other) => {
                return Err(self.wrong(name, format_args!("is `{other}`, an activation that is not known")))
                    .at_caller();
            }
        })
    }

    /// Checks that a field is absent or has the one supported value, `due`.
    #[track_caller]
    pub fn expect(&self, name: &'static str, due: &str) -> Result<()> {
        match self.text(self.known(name))? {
            Some(other) if other != due => {
                Err(self.wrong(name, format_args!("is `{other}`; only `{due}` is known"))).at_caller()
            }
            _ => Ok(()),
        }
    }

    /// Checks that an unsupported option is absent or has the value that changes nothing.
    #[track_caller]
    pub fn require(&self, name: &'static str, harmless: bool) -> Result<()> {
        match self.flag_or(name, harmless)? {
            value if value == harmless => Ok(()),
            value => Err(self.wrong(name, format_args!("is {value}, which is not supported"))).at_caller(),
        }
    }

    /// Checks that every field was read or is harmless. Fields of null, `{}` or `[]` count as absent.
    #[track_caller]
    pub fn finish(&self) -> Result<()> {
        let read = self.read.borrow();
        let unknown = |(name, value): &(&String, &Value)| {
            let is_known = |list: &[&str]| list.binary_search(&name.as_str()).is_ok();
            let off = is_empty(value) || **value == Value::Bool(false) && is_known(OFF);
            !off && !read.contains(name.as_str()) && !is_known(HARMLESS) && !is_generation_field(name)
        };
        let unknown: Vec<String> = self.fields().iter().filter(unknown).map(|(name, _)| format!("`{name}`")).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let why = format!(
            "has fields that may change what the model computes, and that are not known here: {}; delete those that change nothing",
            unknown.join(", ")
        );
        Err(Error::format("config.json", why)).at_caller()
    }

    fn known(&self, name: &'static str) -> &'static str {
        self.read.borrow_mut().insert(name);
        name
    }
}

/// The name of an activation in transformers.
pub(crate) fn activation_name(activation: Activation) -> &'static str {
    match activation {
        Activation::Relu => "relu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_new",
        Activation::Silu => "silu",
        Activation::QuickGelu => "quick_gelu",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_fields_are_sorted() {
        assert!(HARMLESS.is_sorted() && OFF.is_sorted());
    }
}
