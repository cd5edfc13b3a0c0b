//! The names of a decoder's parts in GGUF files.

use super::{ConversionRule as Rule, ConversionTable};

/// The conversion table of decoders to llama.cpp's names, all families in one. Weights are `[O, I]` in both.
pub const GGUF_TABLE: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("token_embd", "embed_tokens"),
        Rule::keep("position_embd", "embed_positions"),
        Rule::keep("blk.{}.attn_norm", "layers.{}.input_norm"),
        Rule::keep("blk.{}.attn_qkv", "layers.{}.self_attn.qkv_proj"),
        Rule::keep("blk.{}.attn_q", "layers.{}.self_attn.q_proj"),
        Rule::keep("blk.{}.attn_k", "layers.{}.self_attn.k_proj"),
        Rule::keep("blk.{}.attn_v", "layers.{}.self_attn.v_proj"),
        Rule::keep("blk.{}.attn_q_norm", "layers.{}.self_attn.q_norm"),
        Rule::keep("blk.{}.attn_k_norm", "layers.{}.self_attn.k_norm"),
        Rule::keep("blk.{}.attn_output", "layers.{}.self_attn.o_proj"),
        Rule::keep("blk.{}.ffn_norm", "layers.{}.mlp_norm"),
        Rule::keep("blk.{}.ffn_gate", "layers.{}.mlp.gate_proj"),
        Rule::keep("blk.{}.ffn_up", "layers.{}.mlp.up_proj"),
        Rule::keep("blk.{}.ffn_down", "layers.{}.mlp.down_proj"),
        Rule::keep("output_norm", "norm"),
        Rule::keep("output", "lm_head"),
    ],
    stacks: &[],
    prefix: "",
    old_leaves: &[],
    // The divisors of frequencies, which the configuration is read from.
    ignored: &["rope_freqs.weight"],
    modules: &[],
    later_layers: [0, 0],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_llama_cpp() {
        let theirs = |ours: &str| GGUF_TABLE.theirs(ours).map(|converted| converted.name);
        assert_eq!(theirs("layers.7.self_attn.q_norm.weight").as_deref(), Some("blk.7.attn_q_norm.weight"));
        assert_eq!(theirs("layers.7.self_attn.q_proj.bias").as_deref(), Some("blk.7.attn_q.bias"));
        assert_eq!(theirs("layers.7"), None);
    }
}
