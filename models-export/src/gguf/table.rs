//! The names of a decoder's parts in GGUF files.

use models::{Change, ConversionRule, ConversionTable};

const fn keep(theirs: &'static str, ours: &'static str) -> ConversionRule {
    ConversionRule { theirs, ours, change: Change::Keep }
}

/// The conversion table of decoders to llama.cpp's names, all families in one. Weights are `[O, I]` in both.
pub const GGUF: ConversionTable = ConversionTable {
    rules: &[
        keep("token_embd", "embed_tokens"),
        keep("position_embd", "embed_positions"),
        keep("blk.{}.attn_norm", "layers.{}.input_norm"),
        keep("blk.{}.attn_qkv", "layers.{}.self_attn.qkv_proj"),
        keep("blk.{}.attn_q", "layers.{}.self_attn.q_proj"),
        keep("blk.{}.attn_k", "layers.{}.self_attn.k_proj"),
        keep("blk.{}.attn_v", "layers.{}.self_attn.v_proj"),
        keep("blk.{}.attn_q_norm", "layers.{}.self_attn.q_norm"),
        keep("blk.{}.attn_k_norm", "layers.{}.self_attn.k_norm"),
        keep("blk.{}.attn_output", "layers.{}.self_attn.o_proj"),
        keep("blk.{}.ffn_norm", "layers.{}.mlp_norm"),
        keep("blk.{}.ffn_gate", "layers.{}.mlp.gate_proj"),
        keep("blk.{}.ffn_up", "layers.{}.mlp.up_proj"),
        keep("blk.{}.ffn_down", "layers.{}.mlp.down_proj"),
        keep("output_norm", "norm"),
        keep("output", "lm_head"),
    ],
    stacks: &[],
    prefix: "",
    old_leaves: &[],
    ignored: &[],
    modules: &[],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_llama_cpp() {
        let theirs = |ours: &str| GGUF.theirs(ours).map(|converted| converted.name);
        assert_eq!(theirs("layers.7.self_attn.q_norm.weight").as_deref(), Some("blk.7.attn_q_norm.weight"));
        assert_eq!(theirs("layers.7.self_attn.q_proj.bias").as_deref(), Some("blk.7.attn_q.bias"));
        assert_eq!(theirs("layers.7"), None);
    }
}
