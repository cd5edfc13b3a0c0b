//! Sizes and options by llama.cpp's names, and checks that it would compute the same.

use data::gguf::GgufValue;
use models::{DecoderConfig, Family, RopeConfig, RopeScaling};
use nn::{Activation, Rotary};
use numcore::{Error, Result};

use super::{GgufOptions, GgufWeights, file::GgufTensor};

/// The version of the formats of quantised blocks.
const QUANTIZATION_VERSION: u32 = 2;

/// The metadata of a model.
///
/// # Errors
/// Fails if llama.cpp would compute something else than this project, or has no key for an option.
pub(super) fn metadata(config: &DecoderConfig, options: &GgufOptions) -> Result<Vec<(String, GgufValue)>> {
    let context = options.context.unwrap_or(config.context);
    check(config, context)?;
    let architecture = architecture(config.family);
    let mut pairs = vec![("general.architecture".to_owned(), GgufValue::Text(architecture.into()))];
    if let Some(name) = &options.name {
        pairs.push(("general.name".into(), GgufValue::Text(name.clone())));
    }
    pairs.push(("general.file_type".into(), GgufValue::U32(options.weights.file_type())));
    pairs.push(("general.quantization_version".into(), GgufValue::U32(QUANTIZATION_VERSION)));
    for (key, count) in [
        ("vocab_size", config.vocab),
        ("context_length", context),
        ("embedding_length", config.width),
        ("block_count", config.layers),
        ("feed_forward_length", config.hidden),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
    ] {
        pairs.push((format!("{architecture}.{key}"), u32_of(key, count)?));
    }
    let eps = if config.family == Family::Gpt2 { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
    pairs.push((format!("{architecture}.attention.{eps}"), GgufValue::F32(config.norm_eps as f32)));
    if let Some(rope) = &config.rope {
        for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
            pairs.push((format!("{architecture}.{key}"), u32_of(key, config.head_dim)?));
        }
        let rotary = rotary(rope).into_iter();
        pairs.extend(rotary.map(|(key, value)| (format!("{architecture}.rope.{key}"), value)));
    }
    Ok(pairs)
}

/// The divisors of each pair's frequency, for the scaling of Llama 3, which llama.cpp reads from a tensor.
pub(super) fn rope_factors<'a>(config: &DecoderConfig) -> Option<GgufTensor<'a>> {
    let rope = config.rope.as_ref().filter(|rope| matches!(rope.scaling, RopeScaling::Llama3 { .. }))?;
    let plain = Rotary::new(rope.theta, config.head_dim);
    let stretched = rope.rotary(config.head_dim);
    let pairs = plain.frequencies.iter().zip(&stretched.frequencies);
    let factors: Vec<f32> = pairs.map(|(plain, stretched)| (plain / stretched) as f32).collect();
    let (name, shape) = ("rope_freqs.weight".to_owned(), vec![factors.len()]);
    Some(GgufTensor { name, shape, weights: GgufWeights::F32, value: Box::new(move || Ok(factors.clone())) })
}

fn architecture(family: Family) -> &'static str {
    match family {
        // Mistral's files have llama.cpp's architecture for Llama.
        Family::Llama | Family::Mistral => "llama",
        // Families with experts are refused before they are written.
        _ => family.name(),
    }
}

fn u32_of(key: &str, count: usize) -> Result<GgufValue> {
    let count = u32::try_from(count).map_err(|_| Error::state(key, format!("is {count}, more than GGUF has room for")));
    count.map(GgufValue::U32)
}

/// The keys of rotary positions. Llama 3's scaling is a tensor instead.
fn rotary(rope: &RopeConfig) -> Vec<(&'static str, GgufValue)> {
    let mut pairs = vec![("freq_base", GgufValue::F32(rope.theta as f32))];
    let (kind, factor) = match rope.scaling {
        RopeScaling::Linear { factor } => ("linear", factor),
        RopeScaling::Yarn { factor, .. } => ("yarn", factor),
        // LongRoPE is refused.
        RopeScaling::Default | RopeScaling::Llama3 { .. } | RopeScaling::LongRope { .. } => return pairs,
    };
    pairs.push(("scaling.type", GgufValue::Text(kind.into())));
    pairs.push(("scaling.factor", GgufValue::F32(factor as f32)));
    if let RopeScaling::Yarn { factor, fast, slow, original, attention, .. } = rope.scaling {
        pairs.push(("scaling.original_context_length", GgufValue::U32(original as u32)));
        pairs.push(("scaling.yarn_beta_fast", GgufValue::F32(fast as f32)));
        pairs.push(("scaling.yarn_beta_slow", GgufValue::F32(slow as f32)));
        // llama.cpp multiplies the usual factor of cosines and sines by this one.
        let usual = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
        if attention != usual {
            pairs.push(("scaling.attn_factor", GgufValue::F32((attention / usual) as f32)));
        }
    }
    pairs
}

/// Checks that llama.cpp would compute the same.
fn check(config: &DecoderConfig, context: usize) -> Result<()> {
    let wrong = |field, why: String| Err(Error::config("gguf", field, why));
    if config.mixtures.is_some() {
        return wrong(
            "mixtures",
            format!("experts of `{}` are not written: save it by `save_pretrained`", config.family.name()),
        );
    }
    crate::check_family("gguf", config.family)?;
    let activation = if config.family == Family::Gpt2 { Activation::GeluTanh } else { Activation::Silu };
    if config.activation != activation {
        let why = format!("is {:?}; llama.cpp computes this family with {activation:?}", config.activation);
        return wrong("activation", why);
    }
    if let Some(window) = config.windows.iter().flatten().min().filter(|window| **window < context) {
        let why = format!(
            "a layer sees {window} tokens, and llama.cpp would let it see all {context} of the context: set `GgufOptions::context` to {window} or less"
        );
        return wrong("windows", why);
    }
    if context == 0 || context > config.context {
        return wrong("context", format!("is {context}, not between 1 and the model's {}", config.context));
    }
    if config.rope.is_none() && context != config.context {
        let why = format!("is {context}, and llama.cpp takes all {} learned positions of a file", config.context);
        return wrong("context", why);
    }
    if matches!(config.family, Family::Qwen2 | Family::Qwen3) && config.output_bias
        || config.family == Family::Qwen3 && config.qkv_bias
    {
        return wrong("attention_bias", format!("llama.cpp has no such biases for `{}`", config.family.name()));
    }
    match config.rope {
        Some(RopeConfig { scaling: RopeScaling::Yarn { truncate: false, .. }, .. }) => {
            wrong("rope", "`truncate` is false, and llama.cpp begins and ends the transition at whole pairs".into())
        }
        Some(RopeConfig { scaling: RopeScaling::LongRope { .. }, .. }) => {
            wrong("rope", "is `longrope`, which is not written: save the model by `save_pretrained`".into())
        }
        _ => Ok(()),
    }
}
