//! The names of a decoder's parts in GGUF files, and what else differs between an architecture's files and folders.

use std::collections::{BTreeMap, BTreeSet};

use super::{ConversionRule as Rule, ConversionTable, pattern::renamed, tables::with};

/// The rules that all architectures share.
const SHARED: [Rule; 14] = [
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
    Rule::keep("blk.{}.ffn_gate", "layers.{}.mlp.gate_proj"),
    Rule::keep("blk.{}.ffn_down", "layers.{}.mlp.down_proj"),
    Rule::keep("output_norm", "norm"),
    Rule::keep("output", "lm_head"),
];

/// The conversion table of decoders to llama.cpp's names, of most families in one. Weights are `[O, I]` in both.
pub const GGUF_TABLE: ConversionTable = ConversionTable {
    rules: &with::<7, 14, 21>(
        [
            Rule::keep("blk.{}.ffn_norm", "layers.{}.mlp_norm"),
            Rule::keep("blk.{}.ffn_up", "layers.{}.mlp.up_proj"),
            Rule::keep("blk.{}.ffn_gate_inp", "layers.{}.mlp.gate"),
            Rule::keep("blk.{}.ffn_gate_up_exps.weight", "layers.{}.mlp.experts.gate_up_proj"),
            Rule::keep("blk.{}.ffn_down_exps.weight", "layers.{}.mlp.experts.down_proj"),
            Rule::keep("blk.{}.post_attention_norm", "layers.{}.post_attention_norm"),
            Rule::keep("blk.{}.post_ffw_norm", "layers.{}.post_mlp_norm"),
        ],
        SHARED,
    ),
    stacks: &[],
    prefix: "",
    old_leaves: &[],
    // The divisors of frequencies, which the configuration is read from.
    ignored: &["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"],
    modules: &[],
};

/// The table of Phi 3, whose gate is in one matrix with the other rows.
const PHI3: ConversionTable = ConversionTable {
    rules: &with::<2, 14, 16>(
        [
            Rule::keep("blk.{}.ffn_norm", "layers.{}.mlp_norm"),
            Rule::keep("blk.{}.ffn_up", "layers.{}.mlp.gate_up_proj"),
        ],
        SHARED,
    ),
    ..GGUF_TABLE
};

/// The table of GPT-OSS, whose norm before the linear layers is called one after attention.
const GPT_OSS: ConversionTable = ConversionTable {
    rules: &with::<7, 14, 21>(
        [
            Rule::keep("blk.{}.post_attention_norm", "layers.{}.mlp_norm"),
            Rule::keep("blk.{}.attn_sinks.weight", "layers.{}.self_attn.sinks"),
            Rule::keep("blk.{}.ffn_gate_inp", "layers.{}.mlp.gate"),
            Rule::keep("blk.{}.ffn_gate_up_exps.weight", "layers.{}.mlp.experts.gate_up_proj"),
            Rule::keep("blk.{}.ffn_gate_up_exps.bias", "layers.{}.mlp.experts.gate_up_proj_bias"),
            Rule::keep("blk.{}.ffn_down_exps.weight", "layers.{}.mlp.experts.down_proj"),
            Rule::keep("blk.{}.ffn_down_exps.bias", "layers.{}.mlp.experts.down_proj_bias"),
        ],
        SHARED,
    ),
    ..GGUF_TABLE
};

/// The way in which the tensors of a file make one weight of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weave {
    /// Rows of an expert follow those of the tensor before.
    Rows,
    /// Columns are rows of the tensors in turn.
    Turns,
}

/// A weight, the tensors that make it, and how. `{}` is the layer.
type WeaveRule = (&'static str, &'static [&'static str], Weave);

/// Experts whose gate is above the other rows.
const EXPERTS: &[WeaveRule] =
    &[("blk.{}.ffn_gate_up_exps.weight", &["blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"], Weave::Rows)];

/// The experts of GPT-OSS: columns of the gate and the other ones take turns.
const GPT_OSS_EXPERTS: &[WeaveRule] = &[
    ("blk.{}.ffn_gate_up_exps.weight", &["blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"], Weave::Turns),
    ("blk.{}.ffn_gate_up_exps.bias", &["blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"], Weave::Turns),
    ("blk.{}.ffn_down_exps.weight", &["blk.{}.ffn_down_exps.weight"], Weave::Turns),
];

/// An architecture of llama.cpp's, and how its files differ from folders.
pub(crate) struct GgufForm {
    /// The name in files, which its keys begin with.
    pub architecture: &'static str,
    /// The family's `model_type`.
    pub family: &'static str,
    /// The names of weights.
    pub table: ConversionTable,
    /// True if the rows of queries and keys are in the order of adjacent components, which are rotated together.
    pub interleaved: bool,
    /// The number that files add to the weights of norms.
    pub norm_offset: f32,
    /// Weights of several tensors.
    weaves: &'static [WeaveRule],
}

impl GgufForm {
    /// The weights that are made of tensors among `names`, and these tensors.
    pub(crate) fn woven<'n>(&self, names: impl Iterator<Item = &'n str>) -> BTreeMap<String, (Vec<String>, Weave)> {
        let all: BTreeSet<_> = names.collect();
        let of = |name: &str, &(whole, parts, weave): &WeaveRule| {
            let first = parts.first()?;
            let parts = parts.iter().map(|part| renamed(first, part, name)).collect::<Option<Vec<_>>>()?;
            let has_all = parts.iter().all(|part| all.contains(&**part));
            renamed(first, whole, name).filter(|_| has_all).map(|whole| (whole, (parts, weave)))
        };
        all.iter().flat_map(|name| self.weaves.iter().filter_map(|weave| of(name, weave))).collect()
    }
}

const fn form(architecture: &'static str, family: &'static str) -> GgufForm {
    GgufForm { architecture, family, table: GGUF_TABLE, interleaved: false, norm_offset: 0.0, weaves: EXPERTS }
}

/// The architectures that are read.
pub(crate) const GGUF_FORMS: &[GgufForm] = &[
    form("gpt2", "gpt2"),
    GgufForm { interleaved: true, ..form("llama", "llama") },
    form("qwen2", "qwen2"),
    form("qwen3", "qwen3"),
    form("qwen3moe", "qwen3_moe"),
    form("olmo2", "olmo2"),
    GgufForm { table: PHI3, ..form("phi3", "phi3") },
    GgufForm { interleaved: true, ..form("smollm3", "smollm3") },
    GgufForm { norm_offset: 1.0, ..form("gemma2", "gemma2") },
    GgufForm { norm_offset: 1.0, ..form("gemma3", "gemma3_text") },
    GgufForm { table: GPT_OSS, weaves: GPT_OSS_EXPERTS, ..form("gpt-oss", "gpt_oss") },
];

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
