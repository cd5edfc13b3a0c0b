//! The fields of families that llama.cpp names, besides sizes.

use data::gguf::GgufValue;
use numcore::Result;
use serde_json::{Value, json};

use super::{Keys, extend};
use crate::convert::GgufForm;

/// Adds the fields of a family to those of its sizes.
pub(super) fn own_fields(form: &GgufForm, keys: &mut Keys<'_>, fields: &mut Value) -> Result<()> {
    let file = keys.file;
    let has = |name: &str| file.tensor(name).is_ok();
    let (experts, used) = (keys.count("expert_count")?.filter(|count| *count > 0), keys.count("expert_used_count")?);
    match form.architecture {
        "gemma2" | "gemma3" => gemma(keys, fields)?,
        // Mixtral has Llama's architecture.
        "llama" if experts.is_some() => fields["model_type"] = "mixtral".into(),
        "qwen3moe" => {
            // llama.cpp has experts in every layer, and divides their weights by the sum.
            let hidden = keys.need("expert_feed_forward_length")?;
            extend(fields, json!({"moe_intermediate_size": hidden, "norm_topk_prob": true}));
        }
        "gpt-oss" => gpt_oss(keys, fields)?,
        "phi3" => {
            fields["sliding_window"] = Value::Null;
            let original = fields["rope_parameters"]["original_max_position_embeddings"].as_f64();
            extend(fields, json!({"original_max_position_embeddings": original.map(|original| original as u64)}));
        }
        _ => {}
    }
    if let Some(experts) = experts {
        let used = used.ok_or_else(|| keys.wrong("expert_used_count", "is missing"))?;
        extend(fields, json!({"num_local_experts": experts, "num_experts_per_tok": used}));
    }
    if matches!(form.architecture, "llama" | "olmo2" | "smollm3" | "gemma2" | "gemma3" | "gpt-oss") {
        let biases = json!({"attention_bias": has("blk.0.attn_q.bias"), "mlp_bias": has("blk.0.ffn_gate.bias")});
        extend(fields, biases);
    }
    if matches!(form.architecture, "olmo2" | "phi3" | "smollm3" | "gemma2" | "gemma3" | "gpt-oss") {
        // Null is no padding; a family's own would be taken of an absent field.
        let padding = file.typed("tokenizer.ggml.padding_token_id", "a count", GgufValue::count)?;
        fields["pad_token_id"] = json!(padding.filter(|padding| Some(*padding) < fields["vocab_size"].as_u64()));
    }
    Ok(())
}

/// The fields of Gemma: soft caps, windows and positions in layers with one, and the factor of scores.
fn gemma(keys: &mut Keys<'_>, fields: &mut Value) -> Result<()> {
    let number = |field: &str| fields[field].as_u64().unwrap_or_default();
    let (layers, heads) = (number("num_hidden_layers"), number("num_attention_heads").max(1));
    // llama.cpp has no key of the factor, and knows the largest models by their number of layers.
    let score_width = if matches!(layers, 46 | 62) { number("hidden_size") / heads } else { number("head_dim") };
    let window = keys.count("attention.sliding_window")?.filter(|window| *window > 0);
    fields["hidden_act"] = Value::Null;
    fields["query_pre_attn_scalar"] = score_width.into();
    extend(fields, json!({"final_logit_softcapping": keys.number("final_logit_softcapping")?}));
    if fields["model_type"] == "gemma2" {
        let softcap = keys.number("attn_logit_softcapping")?;
        extend(fields, json!({"attn_logit_softcapping": softcap, "sliding_window": window}));
    } else {
        let local = keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
        fields["sliding_window"] = json!(window);
        fields["rope_parameters"] = json!({
            "full_attention": fields["rope_parameters"], "sliding_attention": {"rope_type": "default", "rope_theta": local},
        });
    }
    if let Some(pattern) = keys.count("attention.sliding_window_pattern")? {
        let is_full = |layer: u64| pattern > 0 && (layer + 1).is_multiple_of(pattern);
        let kind = |layer| if is_full(layer) { "full_attention" } else { "sliding_attention" };
        fields["layer_types"] = (0..layers).map(kind).collect();
    }
    Ok(())
}

/// The fields of GPT-OSS.
fn gpt_oss(keys: &mut Keys<'_>, fields: &mut Value) -> Result<()> {
    fields["intermediate_size"] = keys.need("expert_feed_forward_length")?.into();
    fields["sliding_window"] = keys.need("attention.sliding_window")?.into();
    // In the published models the transition begins and ends within pairs. llama.cpp has no key of it, and takes whole
    // pairs.
    if fields["rope_parameters"]["rope_type"] == "yarn" {
        fields["rope_parameters"]["truncate"] = false.into();
    }
    Ok(())
}
