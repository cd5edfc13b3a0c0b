//! The options of decoders that Llama does not have, as `config.json` has them.

use nn::LatentConfig;
use numcore::Result;
use serde_json::{Map, Value, json};

use super::{ConfigFields, Family, RopeConfig};
use crate::files::Weights;

/// The options of a decoder that Llama does not have; the default is none of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecoderOptions {
    /// Rotary positions of layers with a sliding window, where they are not those of other layers (Gemma 3).
    pub local_rope: Option<RopeConfig>,
    /// The layers without positions, in order (SmolLM 3).
    pub unrotated: Vec<usize>,
    /// The number whose inverse root is the factor of scores of attention; a head's width if `None`.
    pub score_width: Option<usize>,
    /// The soft cap `c` of scores of attention, which become `c · tanh(score / c)`.
    pub score_softcap: Option<f64>,
    /// The soft cap of logits.
    pub logit_softcap: Option<f64>,
    /// The latent vectors of keys and values (DeepSeek-V3). A configuration's width of a head is then that of the
    /// rotated part.
    pub latent: Option<LatentConfig>,
    /// The width of a head's part that is not rotated, with `latent`.
    pub unrotated_dim: usize,
    /// True if pairs of rotated components are adjacent.
    pub interleaved: bool,
    /// The number of layers of multi-token prediction, which follow the others (DeepSeek-V3).
    pub mtp_layers: usize,
}

/// The names of the number of layers of multi-token prediction; the first is written.
const MTP_LAYERS: [&str; 2] = ["num_nextn_predict_layers", "num_mtp_layers"];

impl DecoderOptions {
    /// Reads the fields of a family but those of positions, for a model of `layers` layers.
    pub(super) fn read(fields: &ConfigFields, family: Family, layers: usize) -> Result<Self> {
        let unrotated = if family == Family::SmolLm3 { unrotated(fields, layers)? } else { Vec::new() };
        if family == Family::DeepseekV3 {
            let query_rank = match fields.has("q_lora_rank") {
                true => fields.maybe_size("q_lora_rank")?,
                false => Some(1536),
            };
            let latent = LatentConfig {
                query_rank,
                rank: fields.size_or("kv_lora_rank", 512)?,
                rotated: fields.size_or("qk_rope_head_dim", 64)?,
                value: fields.size_or("v_head_dim", 128)?,
                // Transformers' norms of latent vectors do not read `rms_norm_eps`.
                eps: 1e-6,
            };
            let unrotated_dim = fields.size_or("qk_nope_head_dim", 128)?;
            // The width of queries and keys together, which follows from the others.
            fields.maybe_size("qk_head_dim")?;
            let interleaved = fields.flag_or("rope_interleave", true)?;
            let mtp_layers = mtp_layers(fields, layers)?;
            let latent = Some(latent);
            return Ok(DecoderOptions { latent, unrotated_dim, interleaved, mtp_layers, ..Default::default() });
        }
        if !family.is_gemma() {
            return Ok(DecoderOptions { unrotated, ..Default::default() });
        }
        fields.require("use_bidirectional_attention", false)?;
        let score_width = Some(fields.size_or("query_pre_attn_scalar", 256)?);
        if score_width == Some(0) {
            return Err(fields.wrong("query_pre_attn_scalar", "is 0"));
        }
        let is_first = family == Family::Gemma2;
        let score_softcap = softcap(fields, "attn_logit_softcapping", is_first.then_some(50.0))?;
        if score_softcap.is_some() && !is_first {
            // Transformers has the field, and does not compute it.
            return Err(fields.wrong("attn_logit_softcapping", "is not null, and Gemma 3 has no soft cap of scores"));
        }
        let logit_softcap = softcap(fields, "final_logit_softcapping", is_first.then_some(30.0))?;
        Ok(DecoderOptions { score_width, score_softcap, logit_softcap, ..Default::default() })
    }

    /// Writes the fields from which these options can be read again.
    pub(super) fn insert_into(&self, fields: &mut Map<String, Value>, family: Family, layers: usize) {
        if family == Family::SmolLm3 {
            let rotated: Vec<u8> = (0..layers).map(|layer| u8::from(!self.unrotated.contains(&layer))).collect();
            fields.insert("no_rope_layers".into(), json!(rotated));
        }
        if let Some(LatentConfig { query_rank, rank, rotated, value, .. }) = self.latent {
            fields.insert("q_lora_rank".into(), json!(query_rank));
            fields.insert("rope_interleave".into(), self.interleaved.into());
            fields.insert("qk_head_dim".into(), (self.unrotated_dim + rotated).into());
            MTP_LAYERS.iter().for_each(|name| drop(fields.remove(*name)));
            fields.insert(MTP_LAYERS[0].into(), self.mtp_layers.into());
            for (name, size) in [
                ("kv_lora_rank", rank),
                ("qk_rope_head_dim", rotated),
                ("qk_nope_head_dim", self.unrotated_dim),
                ("v_head_dim", value),
            ] {
                fields.insert(name.into(), size.into());
            }
        }
        if family.is_gemma() {
            fields.insert("query_pre_attn_scalar".into(), json!(self.score_width));
            fields.insert("attn_logit_softcapping".into(), json!(self.score_softcap));
            fields.insert("final_logit_softcapping".into(), json!(self.logit_softcap));
        }
    }
}

/// The number of layers of multi-token prediction: 1 where no field says, as in transformers. It is 0 where weights are
/// at hand and have none of the first, as in files that transformers wrote.
fn mtp_layers(fields: &ConfigFields, layers: usize) -> Result<usize> {
    let [first, other] = MTP_LAYERS;
    let count = fields.layers_or(first, fields.layers_or(other, 1)?)?;
    let names = ["model.", ""].map(|prefix| format!("{prefix}layers.{layers}.eh_proj.weight"));
    let has = |weights: &Weights| names.iter().any(|name| weights.has(name));
    Ok(if fields.weights().is_none_or(has) { count } else { 0 })
}

/// A soft cap; `default` where the field is absent, none where it is null.
fn softcap(fields: &ConfigFields, name: &'static str, default: Option<f64>) -> Result<Option<f64>> {
    if !fields.has(name) {
        return Ok(default);
    }
    match fields.maybe_number(name)? {
        Some(cap) if cap <= 0.0 => Err(fields.wrong(name, format_args!("is {cap}, and must be above 0"))),
        cap => Ok(cap),
    }
}

/// The layers for which `no_rope_layers` has a 0: every fourth by default.
fn unrotated(fields: &ConfigFields, layers: usize) -> Result<Vec<usize>> {
    let interval = fields.size_or("no_rope_layer_interval", 4)?;
    let Some(rotated) = fields.sizes("no_rope_layers")? else {
        if interval == 0 {
            return Err(fields.wrong("no_rope_layer_interval", "is 0"));
        }
        return Ok((0..layers).filter(|layer| (layer + 1).is_multiple_of(interval)).collect());
    };
    if rotated.len() != layers || rotated.iter().any(|&is| is > 1) {
        let why = format_args!("must be 0 or 1 for each of {layers} layers, and is {rotated:?}");
        return Err(fields.wrong("no_rope_layers", why));
    }
    Ok((0..layers).filter(|&layer| rotated[layer] == 0).collect())
}
