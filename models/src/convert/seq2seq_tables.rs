//! The conversion tables of encoder–decoders.

use super::{ConversionRule as Rule, ConversionTable, tables::with};

/// The rules that both kinds of T5 share.
const OF_T5: [Rule; 27] = [
    Rule::keep("shared", "embed_tokens"),
    // Copies of the token embedding.
    Rule::keep("encoder.embed_tokens", "encoder.embed_tokens"),
    Rule::keep("decoder.embed_tokens", "decoder.own_tokens"),
    Rule::keep("encoder.block.{}.layer.0.layer_norm", "encoder.layers.{}.attention_norm"),
    Rule::keep("encoder.block.{}.layer.0.SelfAttention.q", "encoder.layers.{}.attention.q_proj"),
    Rule::keep("encoder.block.{}.layer.0.SelfAttention.k", "encoder.layers.{}.attention.k_proj"),
    Rule::keep("encoder.block.{}.layer.0.SelfAttention.v", "encoder.layers.{}.attention.v_proj"),
    Rule::keep("encoder.block.{}.layer.0.SelfAttention.o", "encoder.layers.{}.attention.o_proj"),
    Rule::keep("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "encoder.relative"),
    Rule::keep("encoder.block.{}.layer.1.layer_norm", "encoder.layers.{}.mlp_norm"),
    Rule::keep("encoder.block.{}.layer.1.DenseReluDense.wo", "encoder.layers.{}.mlp.down_proj"),
    Rule::keep("encoder.final_layer_norm", "encoder.norm"),
    Rule::keep("decoder.block.{}.layer.0.layer_norm", "decoder.layers.{}.attention_norm"),
    Rule::keep("decoder.block.{}.layer.0.SelfAttention.q", "decoder.layers.{}.attention.q_proj"),
    Rule::keep("decoder.block.{}.layer.0.SelfAttention.k", "decoder.layers.{}.attention.k_proj"),
    Rule::keep("decoder.block.{}.layer.0.SelfAttention.v", "decoder.layers.{}.attention.v_proj"),
    Rule::keep("decoder.block.{}.layer.0.SelfAttention.o", "decoder.layers.{}.attention.o_proj"),
    Rule::keep("decoder.block.0.layer.0.SelfAttention.relative_attention_bias", "decoder.relative"),
    Rule::keep("decoder.block.{}.layer.1.layer_norm", "decoder.layers.{}.cross_norm"),
    Rule::keep("decoder.block.{}.layer.1.EncDecAttention.q", "decoder.layers.{}.cross.q_proj"),
    Rule::keep("decoder.block.{}.layer.1.EncDecAttention.k", "decoder.layers.{}.cross.k_proj"),
    Rule::keep("decoder.block.{}.layer.1.EncDecAttention.v", "decoder.layers.{}.cross.v_proj"),
    Rule::keep("decoder.block.{}.layer.1.EncDecAttention.o", "decoder.layers.{}.cross.o_proj"),
    Rule::keep("decoder.block.{}.layer.2.layer_norm", "decoder.layers.{}.mlp_norm"),
    Rule::keep("decoder.block.{}.layer.2.DenseReluDense.wo", "decoder.layers.{}.mlp.down_proj"),
    Rule::keep("decoder.final_layer_norm", "decoder.norm"),
    Rule::keep("lm_head", "decoder.head"),
];

/// T5.
pub(crate) const T5: ConversionTable = ConversionTable {
    rules: &with::<2, 27, 29>(
        [
            Rule::keep("encoder.block.{}.layer.1.DenseReluDense.wi", "encoder.layers.{}.mlp.up_proj"),
            Rule::keep("decoder.block.{}.layer.2.DenseReluDense.wi", "decoder.layers.{}.mlp.up_proj"),
        ],
        OF_T5,
    ),
    stacks: &[],
    prefix: "",
    old_leaves: &[],
    // A bias that published files have, and no version reads.
    ignored: &["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"],
    modules: &[],
};

/// T5 1.1, whose linear layers have a gate.
pub(crate) const T5_GATED: ConversionTable = ConversionTable {
    rules: &with::<4, 27, 31>(
        [
            Rule::keep("encoder.block.{}.layer.1.DenseReluDense.wi_0", "encoder.layers.{}.mlp.gate_proj"),
            Rule::keep("encoder.block.{}.layer.1.DenseReluDense.wi_1", "encoder.layers.{}.mlp.up_proj"),
            Rule::keep("decoder.block.{}.layer.2.DenseReluDense.wi_0", "decoder.layers.{}.mlp.gate_proj"),
            Rule::keep("decoder.block.{}.layer.2.DenseReluDense.wi_1", "decoder.layers.{}.mlp.up_proj"),
        ],
        OF_T5,
    ),
    ..T5
};

/// Whisper.
pub(crate) const WHISPER: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("model.encoder.conv1", "conv1"),
        Rule::keep("model.encoder.conv2", "conv2"),
        Rule::keep("model.encoder.embed_positions", "embed_positions"),
        Rule::keep("model.encoder.layers.{}.self_attn_layer_norm", "encoder.layers.{}.attention_norm"),
        Rule::keep("model.encoder.layers.{}.self_attn.q_proj", "encoder.layers.{}.attention.q_proj"),
        Rule::keep("model.encoder.layers.{}.self_attn.k_proj", "encoder.layers.{}.attention.k_proj"),
        Rule::keep("model.encoder.layers.{}.self_attn.v_proj", "encoder.layers.{}.attention.v_proj"),
        Rule::keep("model.encoder.layers.{}.self_attn.out_proj", "encoder.layers.{}.attention.o_proj"),
        Rule::keep("model.encoder.layers.{}.final_layer_norm", "encoder.layers.{}.mlp_norm"),
        Rule::keep("model.encoder.layers.{}.fc1", "encoder.layers.{}.mlp.up_proj"),
        Rule::keep("model.encoder.layers.{}.fc2", "encoder.layers.{}.mlp.down_proj"),
        Rule::keep("model.encoder.layer_norm", "encoder.norm"),
        Rule::keep("model.decoder.embed_tokens", "decoder.embed_tokens"),
        Rule::keep("model.decoder.embed_positions", "decoder.embed_positions"),
        Rule::keep("model.decoder.layers.{}.self_attn_layer_norm", "decoder.layers.{}.attention_norm"),
        Rule::keep("model.decoder.layers.{}.self_attn.q_proj", "decoder.layers.{}.attention.q_proj"),
        Rule::keep("model.decoder.layers.{}.self_attn.k_proj", "decoder.layers.{}.attention.k_proj"),
        Rule::keep("model.decoder.layers.{}.self_attn.v_proj", "decoder.layers.{}.attention.v_proj"),
        Rule::keep("model.decoder.layers.{}.self_attn.out_proj", "decoder.layers.{}.attention.o_proj"),
        Rule::keep("model.decoder.layers.{}.encoder_attn_layer_norm", "decoder.layers.{}.cross_norm"),
        Rule::keep("model.decoder.layers.{}.encoder_attn.q_proj", "decoder.layers.{}.cross.q_proj"),
        Rule::keep("model.decoder.layers.{}.encoder_attn.k_proj", "decoder.layers.{}.cross.k_proj"),
        Rule::keep("model.decoder.layers.{}.encoder_attn.v_proj", "decoder.layers.{}.cross.v_proj"),
        Rule::keep("model.decoder.layers.{}.encoder_attn.out_proj", "decoder.layers.{}.cross.o_proj"),
        Rule::keep("model.decoder.layers.{}.final_layer_norm", "decoder.layers.{}.mlp_norm"),
        Rule::keep("model.decoder.layers.{}.fc1", "decoder.layers.{}.mlp.up_proj"),
        Rule::keep("model.decoder.layers.{}.fc2", "decoder.layers.{}.mlp.down_proj"),
        Rule::keep("model.decoder.layer_norm", "decoder.norm"),
        // A copy of the token embedding, unless the head is its own.
        Rule::keep("proj_out", "decoder.head"),
    ],
    prefix: "model.",
    ignored: &[],
    ..T5
};
