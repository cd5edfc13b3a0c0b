//! The mixtures of experts of decoders, as `config.json` has them.

use nn::{
    Activation,
    moe::{ClampedSwiGlu, MoeConfig, RouterGroups, RouterScores},
};
use numcore::Result;
use serde_json::{Map, Value, json};

use super::{ConfigFields, Family};

/// The mixtures of experts of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderMixtures {
    /// The sizes of a mixture, and its routing.
    pub mixture: MoeConfig,
    /// True for each layer that has a mixture in place of its linear layers, multi-token prediction's included.
    pub layers: Vec<bool>,
}

impl DecoderMixtures {
    /// Reads the fields of a family's mixtures, for a model of `width` channels and `layers` layers in all.
    pub(super) fn read(fields: &ConfigFields, family: Family, width: usize, layers: usize) -> Result<Self> {
        let (experts, top_k) = match family {
            Family::Mixtral => (8, 2),
            Family::Qwen2Moe => (60, 4),
            Family::GptOss => (128, 4),
            Family::DeepseekV3 => return deepseek(fields, width, layers),
            _ => (128, 8),
        };
        let experts = count(fields)?.unwrap_or(experts);
        let top_k = fields.size_or("num_experts_per_tok", top_k)?;
        if fields.activation("hidden_act", Activation::Silu)? != Activation::Silu {
            return Err(fields.wrong("hidden_act", "is not `silu`, which is what experts go through"));
        }
        // Fields that only training reads, and that this crate leaves to its caller.
        fields.flag_or("output_router_logits", false)?;
        fields.number_or("router_aux_loss_coef", 0.001)?;
        if matches!(family, Family::Mixtral | Family::GptOss) {
            fields.number_or("router_jitter_noise", 0.0)?;
            let hidden = fields.size_or("intermediate_size", family.defaults().hidden)?;
            let mixture = MoeConfig::new(width, hidden, experts, top_k);
            let clamped = (family == Family::GptOss).then(|| clamped(fields)).transpose()?;
            return Ok(DecoderMixtures { mixture: MoeConfig { clamped, ..mixture }, layers: vec![true; layers] });
        }
        let is_qwen2 = family == Family::Qwen2Moe;
        let hidden = fields.size_or("moe_intermediate_size", if is_qwen2 { 1408 } else { 768 })?;
        let shared_hidden = if is_qwen2 { fields.size_or("shared_expert_intermediate_size", 5632)? } else { 0 };
        let mixture = MoeConfig {
            shared_hidden,
            shared_gate: shared_hidden > 0,
            normalize_weights: fields.flag_or("norm_topk_prob", false)?,
            ..MoeConfig::new(width, hidden, experts, top_k)
        };
        Ok(DecoderMixtures { mixture, layers: sparse_layers(fields, layers)? })
    }

    /// Writes the fields from which these mixtures can be read again.
    pub(super) fn insert_into(&self, fields: &mut Map<String, Value>, family: Family) {
        let MoeConfig { experts, top_k, hidden, shared_hidden, normalize_weights, weight_scale, groups, .. } =
            self.mixture;
        if family == Family::DeepseekV3 {
            let RouterGroups { count, kept } = groups.unwrap_or(RouterGroups { count: 1, kept: 1 });
            for (name, size) in [
                ("n_routed_experts", experts),
                ("num_experts_per_tok", top_k),
                ("moe_intermediate_size", hidden),
                ("n_shared_experts", shared_hidden / hidden.max(1)),
                ("n_group", count),
                ("topk_group", kept),
                ("first_k_dense_replace", self.layers.iter().take_while(|sparse| !**sparse).count()),
            ] {
                fields.insert(name.into(), size.into());
            }
            fields.insert("norm_topk_prob".into(), normalize_weights.into());
            fields.insert("routed_scaling_factor".into(), weight_scale.into());
            return;
        }
        let names = ["num_experts", "num_local_experts"];
        names.iter().for_each(|name| drop(fields.remove(*name)));
        let is_uniform = matches!(family, Family::Mixtral | Family::GptOss);
        fields.insert(names[usize::from(is_uniform)].into(), experts.into());
        fields.insert("num_experts_per_tok".into(), top_k.into());
        if let Some(ClampedSwiGlu { limit, alpha }) = self.mixture.clamped {
            fields.insert("swiglu_limit".into(), limit.into());
            fields.insert("swiglu_alpha".into(), alpha.into());
        }
        if is_uniform {
            fields.insert("intermediate_size".into(), hidden.into());
            return;
        }
        let dense: Vec<usize> = (0..self.layers.len()).filter(|&layer| !self.layers[layer]).collect();
        fields.insert("moe_intermediate_size".into(), hidden.into());
        fields.insert("norm_topk_prob".into(), normalize_weights.into());
        fields.insert("decoder_sparse_step".into(), 1.into());
        fields.insert("mlp_only_layers".into(), json!(dense));
        if family == Family::Qwen2Moe {
            fields.insert("shared_expert_intermediate_size".into(), shared_hidden.into());
        }
    }
}

/// The mixtures of DeepSeek-V3, in all layers but the first ones.
fn deepseek(fields: &ConfigFields, width: usize, layers: usize) -> Result<DecoderMixtures> {
    if fields.activation("hidden_act", Activation::Silu)? != Activation::Silu {
        return Err(fields.wrong("hidden_act", "is not `silu`, which is what experts go through"));
    }
    // Fields of published files that transformers does not read; it computes these values of them.
    fields.expect("scoring_func", "sigmoid")?;
    fields.expect("topk_method", "noaux_tc")?;
    if fields.size_or("moe_layer_freq", 1)? != 1 {
        return Err(fields.wrong("moe_layer_freq", "is not 1, and only that is known"));
    }
    // Fields of training and of ranks.
    fields.flag_or("output_router_logits", false)?;
    fields.number_or("aux_loss_alpha", 0.0)?;
    fields.flag_or("seq_aux", true)?;
    fields.maybe_size("ep_size")?;
    let hidden = fields.size_or("moe_intermediate_size", 2048)?;
    let groups = RouterGroups { count: fields.size_or("n_group", 8)?, kept: fields.size_or("topk_group", 4)? };
    let shared = fields.size_or("n_shared_experts", 1)?;
    if shared == 0 {
        return Err(fields.wrong("n_shared_experts", "is 0, and every mixture of this family has a shared expert"));
    }
    let mixture = MoeConfig {
        shared_hidden: shared.saturating_mul(hidden),
        scores: RouterScores::Sigmoid,
        normalize_weights: fields.flag_or("norm_topk_prob", true)?,
        weight_scale: fields.number_or("routed_scaling_factor", 2.5)?,
        balance_bias: true,
        // One group is no choice.
        groups: (groups != RouterGroups { count: 1, kept: 1 }).then_some(groups),
        ..MoeConfig::new(
            width,
            hidden,
            fields.size_or("n_routed_experts", 256)?,
            fields.size_or("num_experts_per_tok", 8)?,
        )
    };
    let dense = fields.size_or("first_k_dense_replace", 3)?;
    Ok(DecoderMixtures { mixture, layers: (0..layers).map(|layer| layer >= dense).collect() })
}

/// The form of experts in GPT-OSS.
fn clamped(fields: &ConfigFields) -> Result<ClampedSwiGlu> {
    // Fields of published files that transformers does not read.
    fields.maybe_size("experts_per_token")?;
    fields.maybe_size("initial_context_length")?;
    let (limit, alpha) = (fields.number_or("swiglu_limit", 7.0)?, fields.number_or("swiglu_alpha", 1.702)?);
    if limit <= 0.0 {
        return Err(fields.wrong("swiglu_limit", format_args!("is {limit}, and must be above 0")));
    }
    Ok(ClampedSwiGlu { limit, alpha })
}

/// The number of experts, by either of transformers' names for it.
fn count(fields: &ConfigFields) -> Result<Option<usize>> {
    match (fields.maybe_size("num_experts")?, fields.maybe_size("num_local_experts")?) {
        (Some(a), Some(b)) if a != b => {
            Err(fields.wrong("num_local_experts", format_args!("is {b}, `num_experts` {a}")))
        }
        (a, b) => Ok(a.or(b)),
    }
}

/// True for every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list.
fn sparse_layers(fields: &ConfigFields, layers: usize) -> Result<Vec<bool>> {
    let step = fields.size_or("decoder_sparse_step", 1)?;
    let dense = fields.sizes("mlp_only_layers")?.unwrap_or_default();
    if step == 0 {
        return Err(fields.wrong("decoder_sparse_step", "is 0"));
    }
    Ok((0..layers).map(|layer| !dense.contains(&layer) && (layer + 1).is_multiple_of(step)).collect())
}
