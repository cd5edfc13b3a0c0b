//! The fields of a `config.json` from the metadata of a GGUF file.

mod families;
mod rope;

use data::gguf::{GgufFile, GgufValue};
use families::own_fields;
use numcore::{Error, Result};
use rope::rope;
use serde_json::{Map, Value, json};

use crate::{
    convert::{GGUF_FORMS, GgufForm},
    files::JsonObject,
};

/// Keys of an architecture that change nothing where they have this value.
const OFF: [(&str, f64); 4] = [
    ("expert_count", 0.0),
    ("expert_used_count", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
];

/// The architecture of a file.
///
/// # Errors
/// Fails if the file names none, or one that is not known.
fn form(file: &GgufFile) -> Result<&'static GgufForm> {
    let key = "general.architecture";
    let name = file.typed(key, "a string", GgufValue::text)?.ok_or_else(|| file.wrong(key, "is missing"))?;
    let known: Vec<_> = GGUF_FORMS.iter().map(|form| form.architecture).collect();
    let why = || format!("is `{name}`; known are: {}", known.join(", "));
    GGUF_FORMS.iter().find(|form| form.architecture == name).ok_or_else(|| file.wrong(key, why()))
}

/// The metadata of an architecture, of which every key must be read.
struct Keys<'a> {
    file: &'a GgufFile,
    prefix: String,
    read: Vec<String>,
}

impl<'a> Keys<'a> {
    fn typed<T>(&mut self, name: &str, kind: &str, read: impl Fn(&'a GgufValue) -> Option<T>) -> Result<Option<T>> {
        let key = format!("{}{name}", self.prefix);
        let value = self.file.typed(&key, kind, read);
        self.read.push(key);
        value
    }

    fn count(&mut self, name: &str) -> Result<Option<u64>> {
        self.typed(name, "a count", GgufValue::count)
    }

    fn number(&mut self, name: &str) -> Result<Option<f64>> {
        self.typed(name, "a finite floating-point number", |value| value.number().filter(|x| x.is_finite()))
    }

    fn need_number(&mut self, name: &str) -> Result<f64> {
        let number = self.number(name)?;
        number.ok_or_else(|| self.wrong(name, "is missing"))
    }

    fn need(&mut self, name: &str) -> Result<u64> {
        let count = self.count(name)?;
        count.ok_or_else(|| self.wrong(name, "is missing"))
    }

    fn wrong(&self, name: &str, why: impl std::fmt::Display) -> Error {
        self.file.wrong(&format!("{}{name}", self.prefix), why)
    }

    /// Checks that every key of the architecture was read.
    fn finish(self) -> Result<()> {
        let unknown = |key: &&str| key.starts_with(&self.prefix) && !self.read.iter().any(|read| read == key);
        match self.file.keys().find(unknown) {
            Some(key) => Err(self.file.wrong(key, "is not known here, and may change what the model computes")),
            None => Ok(()),
        }
    }
}

/// The fields of a `config.json` of the model in a file.
///
/// # Errors
/// Fails if the architecture is not known, or a key is missing, malformed, or not known to be harmless.
pub(super) fn config_fields(file: &GgufFile) -> Result<JsonObject> {
    let form = form(file)?;
    let architecture = form.architecture;
    let mut keys = Keys { file, prefix: format!("{architecture}."), read: Vec::new() };
    let (width, heads) = (keys.need("embedding_length")?, keys.need("attention.head_count")?);
    if heads == 0 || width == 0 {
        return Err(keys.wrong("attention.head_count", format_args!("is {heads} for {width} channels")));
    }
    let (_, embedding) = file.tensor("token_embd.weight")?;
    let vocab = embedding.first().copied().unwrap_or_default();
    if let Some(stated) = keys.count("vocab_size")?.filter(|stated| *stated != vocab as u64) {
        return Err(keys.wrong("vocab_size", format_args!("is {stated}, and `token_embd.weight` has {vocab} rows")));
    }
    let mut fields = json!({
        "model_type": form.family,
        "vocab_size": vocab,
        "tie_word_embeddings": file.tensor("output.weight").is_err(),
    });
    let (layers, hidden) = (keys.need("block_count")?, keys.need("feed_forward_length")?);
    // A wrong number would take memory for layers before weights are found missing.
    let has_last = || file.tensor(&format!("blk.{}.attn_output.weight", layers - 1)).is_ok();
    if layers > file.names().count() as u64 || layers > 0 && !has_last() {
        return Err(keys.wrong("block_count", format_args!("is {layers}, and the file has not as many blocks")));
    }
    let context = keys.need("context_length")?;
    let kv_heads = keys.count("attention.head_count_kv")?.unwrap_or(heads);
    let may_have_experts = matches!(architecture, "llama" | "qwen3moe" | "gpt-oss");
    for (name, harmless) in OFF.into_iter().filter(|(name, _)| !may_have_experts || !name.starts_with("expert")) {
        let value = keys.typed(name, "a number", |v| v.number().or(v.count().map(|n| n as f64)))?;
        if let Some(value) = value.filter(|value| *value != harmless) {
            return Err(keys.wrong(name, format_args!("is {value}, which is not computed here")));
        }
    }
    if keys.typed("attention.causal", "a boolean", GgufValue::flag)? == Some(false) {
        return Err(keys.wrong("attention.causal", "is false, which is not computed here"));
    }
    // llama.cpp does not compute the window of other architectures.
    let has_window = matches!(architecture, "gemma2" | "gemma3" | "gpt-oss");
    let window = keys.count("attention.sliding_window")?.filter(|window| (1..context).contains(window));
    if let Some(window) = window.filter(|_| !has_window) {
        let why = format!("is {window}, less than the context of {context}: whether it is computed differs by program");
        return Err(keys.wrong("attention.sliding_window", why));
    }
    let more = if architecture == "gpt2" {
        if kv_heads != heads {
            return Err(
                keys.wrong("attention.head_count_kv", format_args!("is {kv_heads}, and there are {heads} heads"))
            );
        }
        json!({
            "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": context, "n_inner": hidden,
            "layer_norm_epsilon": keys.need_number("attention.layer_norm_epsilon")?, "activation_function": "gelu_new",
        })
    } else {
        let head_dim = keys.count("attention.key_length")?.unwrap_or(width / heads);
        let rotated = keys.count("rope.dimension_count")?.unwrap_or(head_dim);
        let other = [
            ("attention.value_length", keys.count("attention.value_length")?),
            ("rope.dimension_count", Some(rotated)),
        ];
        // Phi 4 rotates a part of each head.
        let other = other.into_iter().take(if architecture == "phi3" { 1 } else { 2 });
        for (name, other) in other.filter_map(|(name, other)| Some((name, other?))) {
            if other != head_dim {
                return Err(keys.wrong(name, format_args!("is {other}, and heads have {head_dim} channels")));
            }
        }
        let rope = rope(&mut keys, context, [head_dim, rotated])?.to_json();
        json!({
            "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "max_position_embeddings": context, "hidden_act": "silu",
            "rms_norm_eps": keys.need_number("attention.layer_norm_rms_epsilon")?, "rope_parameters": rope,
        })
    };
    extend(&mut fields, more);
    own_fields(form, &mut keys, &mut fields)?;
    keys.finish()?;
    extend(&mut fields, tokens(file)?);
    Ok(JsonObject::of(file.path().display().to_string(), object(fields)))
}

/// The tokens that begin and end texts, by the names of `config.json`.
fn tokens(file: &GgufFile) -> Result<Value> {
    let token = |name: &str| file.typed(&format!("tokenizer.ggml.{name}"), "a count", GgufValue::count);
    let mut ends: Vec<u64> = [token("eos_token_id")?, token("eot_token_id")?].into_iter().flatten().collect();
    ends.dedup();
    let ends = if let [end] = ends[..] { json!(end) } else { json!(ends) };
    Ok(json!({"bos_token_id": token("bos_token_id")?, "eos_token_id": ends}))
}

fn extend(fields: &mut Value, more: Value) {
    if let (Value::Object(fields), Value::Object(more)) = (fields, more) {
        fields.extend(more.into_iter().filter(|(_, value)| !value.is_null()));
    }
}

fn object(value: Value) -> Map<String, Value> {
    if let Value::Object(fields) = value { fields } else { Map::new() }
}
