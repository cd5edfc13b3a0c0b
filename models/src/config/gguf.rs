//! The fields of a `config.json` from the metadata of a GGUF file.

use data::gguf::{GgufFile, GgufValue};
use nn::Rotary;
use numcore::{Error, Result};
use serde_json::{Map, Value, json};

use super::{RopeConfig, RopeScaling, rope_scaling::long_attention};
use crate::{
    convert::{GGUF_FORMS, GgufForm},
    files::JsonObject,
};

/// The tensor with the divisors of frequencies, for the scaling of Llama 3.
const DIVISORS: &str = "rope_freqs.weight";

/// The tensors with the divisors of LongRoPE, of texts up to the first context and of longer ones.
const LONG_DIVISORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

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
    let is_gemma = matches!(architecture, "gemma2" | "gemma3");
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
    if layers > 0 && file.tensor(&format!("blk.{}.attn_output.weight", layers - 1)).is_err() {
        return Err(keys.wrong("block_count", format_args!("is {layers}, and the file has not as many blocks")));
    }
    let context = keys.need("context_length")?;
    let kv_heads = keys.count("attention.head_count_kv")?.unwrap_or(heads);
    let is_gpt_oss = architecture == "gpt-oss";
    // Mixtral has Llama's architecture.
    let is_mixtral = architecture == "llama" && keys.count("expert_count")?.is_some_and(|count| count > 0);
    let has_experts = is_gpt_oss || is_mixtral || architecture == "qwen3moe";
    for (name, harmless) in OFF.into_iter().filter(|(name, _)| !has_experts || !name.starts_with("expert")) {
        let value = keys.typed(name, "a number", |v| v.number().or(v.count().map(|n| n as f64)))?;
        if let Some(value) = value.filter(|value| *value != harmless) {
            return Err(keys.wrong(name, format_args!("is {value}, which is not computed here")));
        }
    }
    if keys.typed("attention.causal", "a boolean", GgufValue::flag)? == Some(false) {
        return Err(keys.wrong("attention.causal", "is false, which is not computed here"));
    }
    // llama.cpp does not compute the window of other architectures.
    let window = keys.count("attention.sliding_window")?.filter(|window| *window > 0);
    if let Some(window) = window.filter(|window| !is_gemma && !is_gpt_oss && *window < context) {
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
            "max_position_embeddings": context, "hidden_act": (!is_gemma).then_some("silu"),
            "rms_norm_eps": keys.need_number("attention.layer_norm_rms_epsilon")?, "rope_parameters": rope,
        })
    };
    extend(&mut fields, more);
    if is_gemma {
        let head_dim = fields["head_dim"].as_u64().unwrap_or_default();
        gemma(&mut keys, &mut fields, window, if matches!(layers, 46 | 62) { width / heads } else { head_dim })?;
    }
    if has_experts {
        let experts = json!({
            "num_local_experts": keys.need("expert_count")?, "num_experts_per_tok": keys.need("expert_used_count")?,
        });
        extend(&mut fields, experts);
    }
    if is_mixtral {
        fields["model_type"] = "mixtral".into();
    }
    if architecture == "qwen3moe" {
        // llama.cpp has experts in every layer, and divides their weights by the sum.
        let more = json!({"moe_intermediate_size": keys.need("expert_feed_forward_length")?, "norm_topk_prob": true});
        extend(&mut fields, more);
    }
    if is_gpt_oss {
        let more = json!({
            "intermediate_size": keys.need("expert_feed_forward_length")?,
            "sliding_window": keys.need("attention.sliding_window")?,
        });
        extend(&mut fields, more);
        // In the published models the transition begins and ends within pairs. llama.cpp has no key of it, and takes whole
        // pairs.
        if fields["rope_parameters"]["rope_type"] == "yarn" {
            fields["rope_parameters"]["truncate"] = false.into();
        }
    }
    keys.finish()?;
    let has = |name: &str| file.tensor(name).is_ok();
    if !matches!(architecture, "gpt2" | "qwen2" | "qwen3" | "qwen3moe" | "phi3") {
        let biases = json!({"attention_bias": has("blk.0.attn_q.bias"), "mlp_bias": has("blk.0.ffn_gate.bias")});
        extend(&mut fields, biases);
    }
    if !matches!(architecture, "gpt2" | "llama" | "qwen2" | "qwen3" | "qwen3moe") {
        // Null is no padding; a family's own would be taken of an absent field.
        let padding = file.typed("tokenizer.ggml.padding_token_id", "a count", GgufValue::count)?;
        fields["pad_token_id"] = json!(padding.filter(|padding| *padding < vocab as u64));
    }
    if architecture == "phi3" {
        fields["sliding_window"] = Value::Null;
        let original = fields["rope_parameters"]["original_max_position_embeddings"].clone();
        extend(
            &mut fields,
            json!({"original_max_position_embeddings": original.as_f64().map(|original| original as u64)}),
        );
    }
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

/// The fields of Gemma: soft caps, windows and positions in layers with one, and the factor of scores.
fn gemma(keys: &mut Keys<'_>, fields: &mut Value, window: Option<u64>, score_width: u64) -> Result<()> {
    // llama.cpp has no key of the factor, and knows the largest models by their number of layers.
    let more = json!({
        "query_pre_attn_scalar": score_width,
        "final_logit_softcapping": keys.number("final_logit_softcapping")?,
    });
    extend(fields, more);
    let is_first = fields["model_type"] == "gemma2";
    if is_first {
        extend(
            fields,
            json!({"attn_logit_softcapping": keys.number("attn_logit_softcapping")?, "sliding_window": window}),
        );
    } else {
        let local = keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
        fields["sliding_window"] = json!(window);
        fields["rope_parameters"] = json!({
            "full_attention": fields["rope_parameters"], "sliding_attention": {"rope_type": "default", "rope_theta": local},
        });
    }
    if let Some(pattern) = keys.count("attention.sliding_window_pattern")? {
        let layers = fields["num_hidden_layers"].as_u64().unwrap_or_default();
        let is_full = |layer: u64| pattern > 0 && (layer + 1).is_multiple_of(pattern);
        let kind = |layer| if is_full(layer) { "full_attention" } else { "sliding_attention" };
        fields["layer_types"] = (0..layers).map(kind).collect();
    }
    Ok(())
}

fn rope(keys: &mut Keys<'_>, context: u64, [head_dim, rotated]: [u64; 2]) -> Result<RopeConfig> {
    let part = rotated as f64 / head_dim.max(1) as f64;
    let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
    let old = keys.number("rope.scale_linear")?;
    let kind = keys.typed("rope.scaling.type", "a string", GgufValue::text)?;
    let factor = keys.number("rope.scaling.factor")?.or(old);
    let original = keys.count("rope.scaling.original_context_length")?.unwrap_or(context) as f64;
    let is_long = LONG_DIVISORS.iter().any(|name| keys.file.tensor(name).is_ok());
    let (fast, slow) = (keys.number("rope.scaling.yarn_beta_fast")?, keys.number("rope.scaling.yarn_beta_slow")?);
    let attention = keys.number("rope.scaling.attn_factor")?;
    keys.typed("rope.scaling.finetuned", "a boolean", GgufValue::flag)?;
    let scaling = match (kind.or(old.map(|_| "linear")), factor) {
        (Some("linear"), Some(factor)) if factor > 0.0 => RopeScaling::Linear { factor },
        (Some("yarn"), Some(factor)) if factor > 0.0 => {
            // llama.cpp multiplies the usual factor of cosines and sines by this one.
            let usual = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            let (fast, slow) = (fast.unwrap_or(32.0), slow.unwrap_or(1.0));
            let attention = usual * attention.unwrap_or(1.0);
            RopeScaling::Yarn { factor, fast, slow, original, attention, truncate: true, all_dim: 0.0 }
        }
        (None | Some("longrope"), None) if is_long => {
            let [short, long] = LONG_DIVISORS.map(|name| divisors(keys.file, name, rotated));
            let usual = long_attention(context as f64 / original, original);
            // Converters write the usual factor in f32.
            let attention = attention.filter(|own| (own / usual - 1.0).abs() > 1e-6).unwrap_or(usual);
            RopeScaling::LongRope { short: short?, long: long?, original, attention }
        }
        (None | Some("none"), None) => RopeScaling::Default,
        (kind, factor) => {
            let why = format!("is {kind:?} with the factor {factor:?}; linear and yarn are known");
            return Err(keys.wrong("rope.scaling.type", why));
        }
    };
    let is_scaled = matches!(scaling, RopeScaling::Yarn { .. } | RopeScaling::LongRope { .. });
    if let Some(attention) = attention.filter(|x| *x != 1.0 && !is_scaled) {
        let why = format!("is {attention}, which is not computed here without yarn");
        return Err(keys.wrong("rope.scaling.attn_factor", why));
    }
    let is_plain = matches!(scaling, RopeScaling::Default | RopeScaling::Linear { factor: 1.0 });
    match keys.file.tensor(DIVISORS) {
        Ok(_) if is_plain => Ok(RopeConfig { theta, part, scaling: llama3(keys.file, theta, head_dim)? }),
        Ok(_) => Err(keys.file.wrong(DIVISORS, "is beside another scaling of frequencies")),
        Err(_) => Ok(RopeConfig { theta, part, scaling }),
    }
}

/// The divisors of frequencies in a tensor, one for each pair of `rotated` components.
fn divisors(file: &GgufFile, name: &str, rotated: u64) -> Result<Vec<f64>> {
    let (kind, shape) = file.tensor(name)?;
    let rotated = usize::try_from(rotated).unwrap_or(usize::MAX);
    if kind.id() != 0 || shape[..] != [rotated / 2] {
        return Err(file.wrong(name, format_args!("is {kind:?} {shape}, no f32 of each pair of {rotated} channels")));
    }
    let mut bytes = vec![0; 4 * shape.numel()];
    file.read(name, 0, &mut bytes)?;
    let shortest = |x: f32| GgufValue::F32(x).number().unwrap_or_default();
    Ok(bytes.as_chunks::<4>().0.iter().map(|x| shortest(f32::from_le_bytes(*x))).collect())
}

/// The scaling of Llama 3 with the divisors of a file, which has no numbers of it. The divisors depend on ratios of its
/// numbers alone: published ones are tried, with any power of two as the first context.
fn llama3(file: &GgufFile, theta: f64, head_dim: u64) -> Result<RopeScaling> {
    let given = divisors(file, DIVISORS, head_dim)?;
    let head_dim = usize::try_from(head_dim).unwrap_or(usize::MAX);
    let plain = Rotary::new(theta, head_dim);
    // Converters compute divisors in f32.
    let fits = |scaling: &RopeScaling| {
        let stretched = RopeConfig { theta, part: 1.0, scaling: scaling.clone() }.rotary(head_dim);
        let divisors = plain.frequencies.iter().zip(&stretched.frequencies).map(|(plain, own)| plain / own);
        divisors.zip(&given).all(|(own, given)| (own / given - 1.0).abs() < 1e-5)
    };
    let factor = given.iter().copied().fold(1.0, f64::max);
    let scaling = |power: u32| RopeScaling::Llama3 { factor, low: 1.0, high: 4.0, original: f64::from(1 << power) };
    (0..24).rev().map(scaling).find(fits).ok_or_else(|| {
        file.wrong(DIVISORS, "has divisors of frequencies that are not those of Llama 3: no other kind is known")
    })
}

fn extend(fields: &mut Value, more: Value) {
    if let (Value::Object(fields), Value::Object(more)) = (fields, more) {
        fields.extend(more.into_iter().filter(|(_, value)| !value.is_null()));
    }
}

fn object(value: Value) -> Map<String, Value> {
    if let Value::Object(fields) = value { fields } else { Map::new() }
}
