//! The conversion tables of all families.

use super::{ConversionRule as Rule, ConversionTable, StackRule};

/// GPT-2: fused projections, with weights of `[I, O]`.
pub(crate) const GPT2: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("transformer.wte", "embed_tokens"),
        Rule::keep("transformer.wpe", "embed_positions"),
        Rule::keep("transformer.h.{}.ln_1", "layers.{}.input_norm"),
        Rule::transposed("transformer.h.{}.attn.c_attn", "layers.{}.self_attn.qkv_proj"),
        Rule::transposed("transformer.h.{}.attn.c_proj", "layers.{}.self_attn.o_proj"),
        Rule::keep("transformer.h.{}.ln_2", "layers.{}.mlp_norm"),
        Rule::transposed("transformer.h.{}.mlp.c_fc", "layers.{}.mlp.up_proj"),
        Rule::transposed("transformer.h.{}.mlp.c_proj", "layers.{}.mlp.down_proj"),
        Rule::keep("transformer.ln_f", "norm"),
        Rule::keep("lm_head", "lm_head"),
    ],
    stacks: &[],
    prefix: "transformer.",
    old_leaves: &[],
    // The triangular mask and what stood in its place.
    ignored: &["transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"],
    modules: &[],
};

/// The rules that all families derived from Llama share.
const OF_LLAMA: [Rule; 10] = [
    Rule::keep("model.embed_tokens", "embed_tokens"),
    Rule::keep("model.layers.{}.input_layernorm", "layers.{}.input_norm"),
    Rule::keep("model.layers.{}.self_attn.q_proj", "layers.{}.self_attn.q_proj"),
    Rule::keep("model.layers.{}.self_attn.k_proj", "layers.{}.self_attn.k_proj"),
    Rule::keep("model.layers.{}.self_attn.v_proj", "layers.{}.self_attn.v_proj"),
    Rule::keep("model.layers.{}.self_attn.q_norm", "layers.{}.self_attn.q_norm"),
    Rule::keep("model.layers.{}.self_attn.k_norm", "layers.{}.self_attn.k_norm"),
    Rule::keep("model.layers.{}.self_attn.o_proj", "layers.{}.self_attn.o_proj"),
    Rule::keep("model.norm", "norm"),
    Rule::keep("lm_head", "lm_head"),
];

/// Joins a family's rules to those that it shares.
pub(super) const fn with<const M: usize, const K: usize, const N: usize>(
    own: [Rule; M],
    shared: [Rule; K],
) -> [Rule; N] {
    assert!(N == K + M);
    let (mut rules, mut at) = ([shared[0]; N], 0);
    while at < N {
        rules[at] = if at < K { shared[at] } else { own[at - K] };
        at += 1;
    }
    rules
}

/// Llama, Mistral, SmolLM 3, Phi 3 with its fused projections, Qwen 2 and 3. Also Qwen with mixtures, whose experts are
/// one by one in files.
pub(crate) const LLAMA: ConversionTable = ConversionTable {
    rules: &with::<11, 10, 21>(
        [
            Rule::keep("model.layers.{}.post_attention_layernorm", "layers.{}.mlp_norm"),
            Rule::keep("model.layers.{}.self_attn.qkv_proj", "layers.{}.self_attn.qkv_proj"),
            Rule::keep("model.layers.{}.mlp.gate_up_proj", "layers.{}.mlp.gate_up_proj"),
            Rule::keep("model.layers.{}.mlp.gate_proj", "layers.{}.mlp.gate_proj"),
            Rule::keep("model.layers.{}.mlp.up_proj", "layers.{}.mlp.up_proj"),
            Rule::keep("model.layers.{}.mlp.down_proj", "layers.{}.mlp.down_proj"),
            Rule::keep("model.layers.{}.mlp.gate", "layers.{}.mlp.gate"),
            Rule::keep("model.layers.{}.mlp.shared_expert.gate_proj", "layers.{}.mlp.shared_experts.gate_proj"),
            Rule::keep("model.layers.{}.mlp.shared_expert.up_proj", "layers.{}.mlp.shared_experts.up_proj"),
            Rule::keep("model.layers.{}.mlp.shared_expert.down_proj", "layers.{}.mlp.shared_experts.down_proj"),
            Rule::keep("model.layers.{}.mlp.shared_expert_gate", "layers.{}.mlp.shared_expert_gate"),
        ],
        OF_LLAMA,
    ),
    stacks: &[
        StackRule {
            theirs: &["model.layers.{}.mlp.experts.{}.gate_proj", "model.layers.{}.mlp.experts.{}.up_proj"],
            ours: "layers.{}.mlp.experts.gate_up_proj",
        },
        StackRule { theirs: &["model.layers.{}.mlp.experts.{}.down_proj"], ours: "layers.{}.mlp.experts.down_proj" },
    ],
    prefix: "model.",
    old_leaves: &[],
    ignored: &["model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"],
    modules: &[],
};

/// Mixtral, whose files have their own names for experts.
pub(crate) const MIXTRAL: ConversionTable = ConversionTable {
    rules: &with::<2, 10, 12>(
        [
            Rule::keep("model.layers.{}.post_attention_layernorm", "layers.{}.mlp_norm"),
            Rule::keep("model.layers.{}.block_sparse_moe.gate", "layers.{}.mlp.gate"),
        ],
        OF_LLAMA,
    ),
    stacks: &[
        StackRule {
            theirs: &[
                "model.layers.{}.block_sparse_moe.experts.{}.w1",
                "model.layers.{}.block_sparse_moe.experts.{}.w3",
            ],
            ours: "layers.{}.mlp.experts.gate_up_proj",
        },
        StackRule {
            theirs: &["model.layers.{}.block_sparse_moe.experts.{}.w2"],
            ours: "layers.{}.mlp.experts.down_proj",
        },
    ],
    ..LLAMA
};

/// GPT-OSS, whose files have tensors of all experts, as here.
pub(crate) const GPT_OSS: ConversionTable = ConversionTable {
    rules: &with::<7, 10, 17>(
        [
            Rule::keep("model.layers.{}.post_attention_layernorm", "layers.{}.mlp_norm"),
            Rule::keep("model.layers.{}.self_attn.sinks", "layers.{}.self_attn.sinks"),
            Rule::keep("model.layers.{}.mlp.router", "layers.{}.mlp.gate"),
            Rule::keep("model.layers.{}.mlp.experts.gate_up_proj", "layers.{}.mlp.experts.gate_up_proj"),
            Rule::keep("model.layers.{}.mlp.experts.gate_up_proj_bias", "layers.{}.mlp.experts.gate_up_proj_bias"),
            Rule::keep("model.layers.{}.mlp.experts.down_proj", "layers.{}.mlp.experts.down_proj"),
            Rule::keep("model.layers.{}.mlp.experts.down_proj_bias", "layers.{}.mlp.experts.down_proj_bias"),
        ],
        OF_LLAMA,
    ),
    stacks: &[],
    ..LLAMA
};

/// DeepSeek-V3, whose experts are one by one in files.
pub(crate) const DEEPSEEK_V3: ConversionTable = ConversionTable {
    rules: &with::<20, 10, 30>(
        [
            // Layers of multi-token prediction, with their copies of the embedding and the head.
            Rule::keep("model.layers.{}.enorm", "layers.{}.enorm"),
            Rule::keep("model.layers.{}.hnorm", "layers.{}.hnorm"),
            Rule::keep("model.layers.{}.eh_proj", "layers.{}.eh_proj"),
            Rule::keep("model.layers.{}.shared_head.norm", "layers.{}.head_norm"),
            Rule::keep("model.layers.{}.embed_tokens", "layers.{}.embed_tokens"),
            Rule::keep("model.layers.{}.shared_head.head", "layers.{}.shared_head.head"),
            Rule::keep("model.layers.{}.post_attention_layernorm", "layers.{}.mlp_norm"),
            Rule::keep("model.layers.{}.self_attn.q_a_proj", "layers.{}.self_attn.q_a_proj"),
            Rule::keep("model.layers.{}.self_attn.q_a_layernorm", "layers.{}.self_attn.q_a_norm"),
            Rule::keep("model.layers.{}.self_attn.q_b_proj", "layers.{}.self_attn.q_b_proj"),
            Rule::keep("model.layers.{}.self_attn.kv_a_proj_with_mqa", "layers.{}.self_attn.kv_a_proj"),
            Rule::keep("model.layers.{}.self_attn.kv_a_layernorm", "layers.{}.self_attn.kv_a_norm"),
            Rule::keep("model.layers.{}.self_attn.kv_b_proj", "layers.{}.self_attn.kv_b_proj"),
            Rule::keep("model.layers.{}.mlp.gate_proj", "layers.{}.mlp.gate_proj"),
            Rule::keep("model.layers.{}.mlp.up_proj", "layers.{}.mlp.up_proj"),
            Rule::keep("model.layers.{}.mlp.down_proj", "layers.{}.mlp.down_proj"),
            Rule::keep("model.layers.{}.mlp.gate", "layers.{}.mlp.gate"),
            Rule::keep("model.layers.{}.mlp.shared_experts.gate_proj", "layers.{}.mlp.shared_experts.gate_proj"),
            Rule::keep("model.layers.{}.mlp.shared_experts.up_proj", "layers.{}.mlp.shared_experts.up_proj"),
            Rule::keep("model.layers.{}.mlp.shared_experts.down_proj", "layers.{}.mlp.shared_experts.down_proj"),
        ],
        OF_LLAMA,
    ),
    ..LLAMA
};

/// Gemma 2 and 3, and OLMo 2, which has norms of outputs alone.
pub(crate) const GEMMA: ConversionTable = ConversionTable {
    rules: &with::<6, 10, 16>(
        [
            Rule::keep("model.layers.{}.post_attention_layernorm", "layers.{}.post_attention_norm"),
            Rule::keep("model.layers.{}.pre_feedforward_layernorm", "layers.{}.mlp_norm"),
            Rule::keep("model.layers.{}.post_feedforward_layernorm", "layers.{}.post_mlp_norm"),
            Rule::keep("model.layers.{}.mlp.gate_proj", "layers.{}.mlp.gate_proj"),
            Rule::keep("model.layers.{}.mlp.up_proj", "layers.{}.mlp.up_proj"),
            Rule::keep("model.layers.{}.mlp.down_proj", "layers.{}.mlp.down_proj"),
        ],
        OF_LLAMA,
    ),
    stacks: &[],
    ..LLAMA
};

/// BERT and its heads.
pub(crate) const BERT: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("bert.embeddings.word_embeddings", "embed_tokens"),
        Rule::keep("bert.embeddings.position_embeddings", "embed_positions"),
        Rule::keep("bert.embeddings.token_type_embeddings", "embed_types"),
        Rule::keep("bert.embeddings.LayerNorm", "embed_norm"),
        Rule::keep("bert.encoder.layer.{}.attention.self.query", "layers.{}.query"),
        Rule::keep("bert.encoder.layer.{}.attention.self.key", "layers.{}.key"),
        Rule::keep("bert.encoder.layer.{}.attention.self.value", "layers.{}.value"),
        Rule::keep("bert.encoder.layer.{}.attention.output.dense", "layers.{}.output"),
        Rule::keep("bert.encoder.layer.{}.attention.output.LayerNorm", "layers.{}.norm1"),
        Rule::keep("bert.encoder.layer.{}.intermediate.dense", "layers.{}.fc1"),
        Rule::keep("bert.encoder.layer.{}.output.dense", "layers.{}.fc2"),
        Rule::keep("bert.encoder.layer.{}.output.LayerNorm", "layers.{}.norm2"),
        Rule::keep("bert.pooler.dense", "pooler"),
        Rule::keep("cls.predictions.transform.dense", "head.transform"),
        Rule::keep("cls.predictions.transform.LayerNorm", "head.norm"),
        Rule::keep("cls.predictions.bias", "head.bias"),
        // Copies of the token embedding and of the bias above.
        Rule::keep("cls.predictions.decoder", "head.decoder"),
        Rule::keep("classifier", "head.classifier"),
    ],
    stacks: &[],
    prefix: "bert.",
    old_leaves: &[("gamma", "weight"), ("beta", "bias")],
    // Positions 0, 1, …, and the head for the next sentence.
    ignored: &["bert.embeddings.position_ids", "cls.seq_relationship.weight", "cls.seq_relationship.bias"],
    modules: &[],
};

/// The rules that all models of RoBERTa share.
const OF_ROBERTA: [Rule; 16] = [
    Rule::keep("roberta.embeddings.word_embeddings", "embed_tokens"),
    Rule::keep("roberta.embeddings.position_embeddings", "embed_positions"),
    Rule::keep("roberta.embeddings.token_type_embeddings", "embed_types"),
    Rule::keep("roberta.embeddings.LayerNorm", "embed_norm"),
    Rule::keep("roberta.encoder.layer.{}.attention.self.query", "layers.{}.query"),
    Rule::keep("roberta.encoder.layer.{}.attention.self.key", "layers.{}.key"),
    Rule::keep("roberta.encoder.layer.{}.attention.self.value", "layers.{}.value"),
    Rule::keep("roberta.encoder.layer.{}.attention.output.dense", "layers.{}.output"),
    Rule::keep("roberta.encoder.layer.{}.attention.output.LayerNorm", "layers.{}.norm1"),
    Rule::keep("roberta.encoder.layer.{}.intermediate.dense", "layers.{}.fc1"),
    Rule::keep("roberta.encoder.layer.{}.output.dense", "layers.{}.fc2"),
    Rule::keep("roberta.encoder.layer.{}.output.LayerNorm", "layers.{}.norm2"),
    Rule::keep("lm_head.dense", "head.transform"),
    Rule::keep("lm_head.layer_norm", "head.norm"),
    Rule::keep("lm_head.bias", "head.bias"),
    Rule::keep("lm_head.decoder", "head.decoder"),
];

/// RoBERTa and its heads, but that for classes of texts.
pub(crate) const ROBERTA: ConversionTable = ConversionTable {
    rules: &with::<2, 16, 18>(
        [Rule::keep("roberta.pooler.dense", "pooler"), Rule::keep("classifier", "head.classifier")],
        OF_ROBERTA,
    ),
    prefix: "roberta.",
    ignored: &["roberta.embeddings.position_ids"],
    ..BERT
};

/// RoBERTa with a classifier of texts, which has the linear layer of the first token.
pub(crate) const ROBERTA_OF_TEXTS: ConversionTable = ConversionTable {
    rules: &with::<2, 16, 18>(
        [Rule::keep("classifier.dense", "pooler"), Rule::keep("classifier.out_proj", "head.classifier")],
        OF_ROBERTA,
    ),
    // A pretrained model has a pooler in the place of this head.
    ignored: &["roberta.embeddings.position_ids", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias"],
    ..ROBERTA
};

/// DistilBERT and its heads.
pub(crate) const DISTILBERT: ConversionTable = ConversionTable {
    rules: &[
        Rule::keep("distilbert.embeddings.word_embeddings", "embed_tokens"),
        Rule::keep("distilbert.embeddings.position_embeddings", "embed_positions"),
        Rule::keep("distilbert.embeddings.LayerNorm", "embed_norm"),
        Rule::keep("distilbert.transformer.layer.{}.attention.q_lin", "layers.{}.query"),
        Rule::keep("distilbert.transformer.layer.{}.attention.k_lin", "layers.{}.key"),
        Rule::keep("distilbert.transformer.layer.{}.attention.v_lin", "layers.{}.value"),
        Rule::keep("distilbert.transformer.layer.{}.attention.out_lin", "layers.{}.output"),
        Rule::keep("distilbert.transformer.layer.{}.sa_layer_norm", "layers.{}.norm1"),
        Rule::keep("distilbert.transformer.layer.{}.ffn.lin1", "layers.{}.fc1"),
        Rule::keep("distilbert.transformer.layer.{}.ffn.lin2", "layers.{}.fc2"),
        Rule::keep("distilbert.transformer.layer.{}.output_layer_norm", "layers.{}.norm2"),
        Rule::keep("pre_classifier", "pooler"),
        Rule::keep("vocab_transform", "head.transform"),
        Rule::keep("vocab_layer_norm", "head.norm"),
        Rule::keep("vocab_projector.bias", "head.bias"),
        Rule::keep("vocab_projector", "head.decoder"),
        Rule::keep("classifier", "head.classifier"),
    ],
    prefix: "distilbert.",
    ignored: &["distilbert.embeddings.position_ids"],
    ..BERT
};
