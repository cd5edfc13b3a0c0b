//! The fields of a decoder's `config.json`: those of GPT-2, and those of the families that are like Llama.

use nn::Activation;
use numcore::Result;

use super::DecoderConfig;
use crate::config::{ConfigFields, DecoderMixtures, DecoderOptions, Family, RopeConfig, windows::windows};

pub(super) fn gpt2(fields: &ConfigFields) -> Result<DecoderConfig> {
    let defaults = Family::Gpt2.defaults();
    let (width, heads) = (fields.size_or("n_embd", defaults.width)?, fields.size_or("n_head", defaults.heads)?);
    let layers = fields.layers_or("n_layer", defaults.layers)?;
    for (name, harmless) in [
        ("scale_attn_weights", true),
        ("scale_attn_by_inverse_layer_idx", false),
        ("reorder_and_upcast_attn", false),
        ("add_cross_attention", false),
    ] {
        fields.require(name, harmless)?;
    }
    Ok(DecoderConfig {
        family: Family::Gpt2,
        vocab: fields.size_or("vocab_size", defaults.vocab)?,
        width,
        layers,
        heads,
        kv_heads: heads,
        head_dim: head_dim(fields, width, heads)?,
        hidden: fields.size_or("n_inner", 4 * width)?,
        context: fields.size_or("n_positions", defaults.context)?,
        norm_eps: fields.number_or("layer_norm_epsilon", defaults.norm_eps)?,
        activation: fields.activation("activation_function", Activation::GeluTanh)?,
        rope: None,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        windows: vec![None; layers],
        options: DecoderOptions::default(),
        mixtures: None,
        tied: fields.flag_or("tie_word_embeddings", defaults.tied)?,
        padding: None,
        fields: fields.fields().clone(),
    })
}

pub(super) fn llama(fields: &ConfigFields, family: Family) -> Result<DecoderConfig> {
    let defaults = family.defaults();
    let width = fields.size_or("hidden_size", defaults.width)?;
    let heads = fields.size_or("num_attention_heads", defaults.heads)?;
    let layers = fields.layers_or("num_hidden_layers", defaults.layers)?;
    let context = fields.size_or("max_position_embeddings", defaults.context)?;
    // Null gives as many as heads of queries.
    let kv_default = defaults.kv_heads.filter(|_| !fields.has("num_key_value_heads")).unwrap_or(heads);
    let is_biased = family == Family::GptOss;
    let attention_bias = family.has_attention_bias() && fields.flag_or("attention_bias", is_biased)?;
    let qkv_bias = match family {
        Family::Qwen2 => true,
        Family::Qwen2Moe => fields.flag_or("qkv_bias", true)?,
        _ => attention_bias,
    };
    let own_dim = fields.maybe_size("head_dim")?.or(defaults.head_dim);
    // Transformers has the rotated part there, whatever the field says.
    let own_dim =
        if family == Family::DeepseekV3 { fields.maybe_size("qk_rope_head_dim")?.or(Some(64)) } else { own_dim };
    let (rope, local_rope) = RopeConfig::read_all(fields, family, defaults.theta, context)?;
    let options = DecoderOptions { local_rope, ..DecoderOptions::read(fields, family, layers)? };
    let all = layers + options.mtp_layers;
    let mixtures = family.has_experts().then(|| DecoderMixtures::read(fields, family, width, all));
    let vocab = fields.size_or("vocab_size", defaults.vocab)?;
    if family == Family::Phi3 {
        // Fields of published files that transformers does not read.
        for (name, off) in [("full_attn_mod", 1), ("interpolate_factor", 1)] {
            if fields.size_or(name, off)? != off {
                return Err(fields.wrong(name, format_args!("is not {off}, and only that is known")));
            }
        }
    }
    let activation = if family.is_gemma() {
        // A field of published files that transformers does not read.
        fields.activation("hidden_act", Activation::GeluTanh)?;
        fields.activation("hidden_activation", Activation::GeluTanh)?
    } else {
        fields.activation("hidden_act", Activation::Silu)?
    };
    let own_padding = defaults.padding.filter(|_| !fields.has("pad_token_id"));
    Ok(DecoderConfig {
        family,
        vocab,
        width,
        layers,
        heads,
        kv_heads: fields.size_or("num_key_value_heads", kv_default)?,
        head_dim: own_dim.map_or_else(|| head_dim(fields, width, heads), Ok)?,
        hidden: fields.size_or("intermediate_size", defaults.hidden)?,
        context,
        norm_eps: fields.number_or("rms_norm_eps", defaults.norm_eps)?,
        activation,
        rope: Some(rope),
        qkv_bias,
        output_bias: attention_bias,
        mlp_bias: family.has_mlp_bias() && fields.flag_or("mlp_bias", false)?,
        windows: windows(fields, family, layers, &options.unrotated)?,
        options,
        mixtures: mixtures.transpose()?,
        tied: fields.flag_or("tie_word_embeddings", defaults.tied)?,
        padding: fields.row("pad_token_id", vocab)?.or(own_padding),
        fields: fields.fields().clone(),
    })
}

fn head_dim(fields: &ConfigFields, width: usize, heads: usize) -> Result<usize> {
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(
            fields.wrong("head_dim", format_args!("is missing, and {heads} heads do not divide {width} channels"))
        );
    }
    Ok(width / heads)
}
