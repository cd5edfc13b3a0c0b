//! The sizes and options of a decoder.

mod read;

use nn::{Activation, moe::MoeConfig};
use numcore::{Error, Result, Within};
use serde_json::{Map, Value, json};

use super::{
    ConfigFields, DecoderMixtures, DecoderOptions, Family, RopeConfig, activation_name, check_sizes,
    windows::insert_windows,
};
use crate::{files::JsonObject, quantize::quantization};

/// The sizes and options of a [`Decoder`](crate::Decoder), as `config.json` has them.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The family, which determines norms, gates and names.
    pub family: Family,
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The number of channels, `C`.
    pub width: usize,
    /// The number of layers.
    pub layers: usize,
    /// The number of heads of queries.
    pub heads: usize,
    /// The number of heads of keys and values.
    pub kv_heads: usize,
    /// The width of a head, `D`.
    pub head_dim: usize,
    /// The width between the linear layers; that of experts is in `mixtures`.
    pub hidden: usize,
    /// The longest sequence that the model was made for, in tokens.
    pub context: usize,
    /// The constant added to variances and mean squares in norms.
    pub norm_eps: f64,
    /// The activation between the linear layers.
    pub activation: Activation,
    /// Rotary positions; learned ones if `None`.
    pub rope: Option<RopeConfig>,
    /// True if the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the output projection of attention has a bias.
    pub output_bias: bool,
    /// True if the other linear layers have biases.
    pub mlp_bias: bool,
    /// The number of keys that a query sees, for each layer; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// Options that Llama does not have.
    pub options: DecoderOptions,
    /// Mixtures of experts, in the families that have them.
    pub mixtures: Option<DecoderMixtures>,
    /// True if the head shares the weight of the token embedding.
    pub tied: bool,
    /// The padding token, whose embedding is not trained; `None` for GPT-2.
    pub padding: Option<usize>,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

impl DecoderConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// Fails if the family is not known, or sizes do not fit each other. Fails too if a field is missing, malformed, or
    /// unknown and not known to be harmless.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        let config = Self::parsed(fields).at_caller()?;
        config.check().at_caller()?;
        Ok(config)
    }

    fn parsed(fields: &ConfigFields) -> Result<Self> {
        let family = Family::of(fields)?;
        let config = if family == Family::Gpt2 { read::gpt2(fields)? } else { read::llama(fields, family)? };
        fields.require("is_causal", true)?;
        fields.part("quantization_config")?;
        quantization(fields)?;
        fields.finish()?;
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads: those that were read, brought up to date.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        fields.insert("model_type".into(), self.family.name().into());
        fields.insert("architectures".into(), json!([self.family.architecture()]));
        fields.insert("tie_word_embeddings".into(), self.tied.into());
        fields.insert("vocab_size".into(), self.vocab.into());
        if self.family == Family::Gpt2 {
            for (name, value) in [
                ("n_embd", self.width),
                ("n_layer", self.layers),
                ("n_head", self.heads),
                ("n_positions", self.context),
                ("n_inner", self.hidden),
            ] {
                fields.insert(name.into(), value.into());
            }
            fields.insert("layer_norm_epsilon".into(), json!(self.norm_eps));
            fields.insert("activation_function".into(), activation_name(self.activation).into());
            return fields;
        }
        for (name, value) in [
            ("hidden_size", self.width),
            ("intermediate_size", self.hidden),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.context),
        ] {
            fields.insert(name.into(), value.into());
        }
        fields.insert("rms_norm_eps".into(), json!(self.norm_eps));
        match (self.family.is_gemma(), self.activation) {
            (true, Activation::GeluTanh) => fields.insert("hidden_activation".into(), "gelu_pytorch_tanh".into()),
            (true, other) => fields.insert("hidden_activation".into(), activation_name(other).into()),
            (false, activation) => fields.insert("hidden_act".into(), activation_name(activation).into()),
        };
        self.insert_options(&mut fields);
        fields
    }

    /// This configuration without layers of multi-token prediction.
    pub(crate) fn without_mtp(mut self) -> Self {
        self.options.mtp_layers = 0;
        self.mixtures.iter_mut().for_each(|mixtures| mixtures.layers.truncate(self.layers));
        self
    }

    /// The mixture of experts that a layer has in place of its linear layers, if any.
    pub fn mixture_of(&self, layer: usize) -> Option<MoeConfig> {
        let mixtures = self.mixtures.as_ref()?;
        mixtures.layers.get(layer).copied()?.then(|| mixtures.mixture.clone())
    }

    /// The place of a layer's positions in [`ropes`](DecoderConfig::ropes); `None` if it has none.
    pub(crate) fn rotary_of(&self, layer: usize) -> Option<usize> {
        let is_local = self.options.local_rope.is_some() && self.windows.get(layer).is_some_and(Option::is_some);
        (self.rope.is_some() && !self.options.unrotated.contains(&layer)).then_some(usize::from(is_local))
    }

    /// The rotary positions of layers: those of most, then those of layers with a window, if they have others.
    pub(crate) fn ropes(&self) -> impl Iterator<Item = &RopeConfig> {
        self.rope.iter().chain(&self.options.local_rope)
    }

    /// The fields of positions, biases and windows.
    fn insert_options(&self, fields: &mut Map<String, Value>) {
        let has_padding = self.padding.or(self.family.defaults().padding).is_some();
        if has_padding || fields.contains_key("pad_token_id") {
            fields.insert("pad_token_id".into(), json!(self.padding));
        }
        if let Some(rope) = &self.rope {
            rope.insert_into(fields, (self.family, self.context), self.options.local_rope.as_ref());
        }
        if self.family.has_attention_bias() {
            fields.insert("attention_bias".into(), self.qkv_bias.into());
        }
        if self.family.has_mlp_bias() {
            fields.insert("mlp_bias".into(), self.mlp_bias.into());
        }
        insert_windows(fields, self.family, &self.windows);
        self.options.insert_into(fields, self.family, self.layers);
        if self.family == Family::Qwen2Moe {
            fields.insert("qkv_bias".into(), self.qkv_bias.into());
        }
        if let Some(mixtures) = &self.mixtures {
            mixtures.insert_into(fields, self.family);
        }
    }

    /// Checks that the sizes fit each other.
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |field, why: String| Err(Error::config("decoder", field, why));
        check_sizes(
            "decoder",
            &[
                ("vocab", self.vocab),
                ("width", self.width),
                ("heads", self.heads),
                ("kv_heads", self.kv_heads),
                ("head_dim", self.head_dim),
                ("hidden", self.hidden),
                ("context", self.context),
            ],
        )?;
        for (field, size) in [("vocab", self.vocab), ("width", self.width), ("context", self.context)] {
            if size == 0 {
                return wrong(field, format!("`{field}` is 0"));
            }
        }
        self.ropes().try_for_each(|rope| rope.check(self.head_dim))?;
        let latent = self.options.latent.is_some_and(|latent| latent.rotated != self.head_dim);
        if latent || self.options.unrotated_dim > 0 && self.options.latent.is_none() {
            return wrong("options", format!("{:?} do not fit heads of {} rotated ones", self.options, self.head_dim));
        }
        if self.windows.len() != self.layers {
            return wrong("windows", format!("{} windows for {} layers", self.windows.len(), self.layers));
        }
        if let Some(DecoderMixtures { mixture, layers }) = &self.mixtures {
            mixture.check()?;
            let sizes =
                [("experts", mixture.experts), ("moe hidden", mixture.hidden), ("shared", mixture.shared_hidden)];
            check_sizes("decoder", &sizes)?;
            let all = self.layers + self.options.mtp_layers;
            if layers.len() != all || mixture.width != self.width {
                let why = format!(
                    "mixtures of {} channels in {} layers for a model of {} in {}",
                    mixture.width,
                    layers.len(),
                    self.width,
                    all
                );
                return wrong("mixtures", why);
            }
        }
        self.check_family()
    }

    /// Checks that the fields to be written describe this very model: a family does not have every option.
    fn check_family(&self) -> Result<()> {
        let fields = ConfigFields::of(JsonObject::of("config.json of this model", self.to_json()));
        let again = DecoderConfig { fields: self.fields.clone(), ..Self::parsed(&fields)? };
        if again == *self {
            return Ok(());
        }
        let options = |config: &Self| {
            let sizes = (config.vocab, config.width, config.heads, config.kv_heads, config.head_dim, config.hidden);
            let biases = (config.qkv_bias, config.output_bias, config.mlp_bias);
            let (rope, windows, mixtures, padding) = (&config.rope, &config.windows, &config.mixtures, config.padding);
            let options = &config.options;
            format!(
                "sizes {sizes:?}, {rope:?}, biases {biases:?}, windows {windows:?}, {options:?}, mixtures {mixtures:?}, padding {padding:?}"
            )
        };
        let (family, own, theirs) = (self.family.name(), options(self), options(&again));
        let why = format!("a `{family}` cannot be so: given {own}; transformers would make it {theirs}");
        Err(Error::config("decoder", "family", why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RopeScaling;

    fn read(family: &str, fields: Value) -> Result<DecoderConfig> {
        let mut fields = fields.as_object().cloned().unwrap_or_default();
        fields.insert("model_type".into(), family.into());
        DecoderConfig::read(&ConfigFields::of(JsonObject::of("config.json", fields)))
    }

    /// The defaults of transformers 5.24: vocabulary, width, width between linear layers, layers, heads, heads of keys,
    /// their width, context.
    #[test]
    fn what_is_not_said_is_as_in_transformers() {
        for (family, sizes, eps, theta) in [
            ("gpt2", [50_257, 768, 3072, 12, 12, 12, 64, 1024], 1e-5, None),
            ("llama", [32_000, 4096, 11_008, 32, 32, 32, 128, 2048], 1e-6, Some(1e4)),
            ("mistral", [32_000, 4096, 14_336, 32, 32, 8, 128, 131_072], 1e-6, Some(1e4)),
            ("qwen2", [151_936, 4096, 22_016, 32, 32, 32, 128, 32_768], 1e-6, Some(1e4)),
            ("qwen3", [151_936, 4096, 22_016, 32, 32, 32, 128, 32_768], 1e-6, Some(1e4)),
            ("mixtral", [32_000, 4096, 14_336, 32, 32, 8, 128, 131_072], 1e-5, Some(1e6)),
            ("qwen2_moe", [151_936, 2048, 5632, 24, 16, 16, 128, 32_768], 1e-6, Some(1e4)),
            ("qwen3_moe", [151_936, 2048, 6144, 24, 32, 4, 64, 32_768], 1e-6, Some(1e4)),
            ("olmo2", [50_304, 4096, 11_008, 32, 32, 32, 128, 2048], 1e-5, Some(1e4)),
            ("phi3", [32_064, 3072, 8192, 32, 32, 32, 96, 4096], 1e-5, Some(1e4)),
            ("smollm3", [128_256, 2048, 11_008, 36, 16, 4, 128, 32_768], 1e-6, Some(2e6)),
            ("gemma2", [256_000, 2304, 9216, 26, 8, 4, 256, 8192], 1e-6, Some(1e4)),
            ("gemma3_text", [262_208, 2304, 9216, 26, 8, 4, 256, 131_072], 1e-6, Some(1e6)),
            ("gpt_oss", [201_088, 2880, 2880, 36, 64, 8, 64, 131_072], 1e-5, Some(1.5e5)),
            ("deepseek_v3", [129_280, 7168, 18_432, 61, 128, 128, 64, 4096], 1e-6, Some(1e4)),
        ] {
            let c = read(family, json!({})).unwrap();
            let got = [c.vocab, c.width, c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim, c.context];
            assert_eq!((got, c.norm_eps, c.rope.as_ref().map(|rope| rope.theta)), (sizes, eps, theta), "{family}");
            let full = |layer: usize| match family {
                "mistral" => false,
                "gemma2" | "gpt_oss" => layer % 2 == 1,
                "gemma3_text" => layer % 6 == 5,
                _ => true,
            };
            let size = if family == "gpt_oss" { 128 } else { 4096 };
            let windows = (0..c.layers).map(|layer| (!full(layer)).then_some(size));
            assert!(windows.eq(c.windows.iter().copied()), "{family}");
            assert_eq!(c.tied, matches!(family, "gpt2" | "smollm3" | "gemma2" | "gemma3_text"), "{family}");
        }
        let padding = |family, fields| read(family, fields).unwrap().padding;
        assert_eq!((padding("olmo2", json!({})), padding("olmo2", json!({"pad_token_id": null}))), (Some(1), None));
        let smollm3 = read("smollm3", json!({"num_hidden_layers": 9})).unwrap();
        assert_eq!(smollm3.options.unrotated, [3, 7]);
        let gemma2 = read("gemma2", json!({})).unwrap().options;
        assert_eq!(
            (gemma2.score_width, gemma2.score_softcap, gemma2.logit_softcap),
            (Some(256), Some(50.0), Some(30.0))
        );
        let (oss, no_scaling) = (read("gpt_oss", json!({})).unwrap(), json!({"rope_parameters": {"rope_theta": 9.0}}));
        assert!(oss.qkv_bias && oss.output_bias);
        let mixture = oss.mixtures.unwrap().mixture;
        assert_eq!((mixture.experts, mixture.top_k, mixture.clamped.map(|c| c.limit)), (128, 4, Some(7.0)));
        let attention = 0.1 * f64::ln(32.0) + 1.0;
        let (factor, fast, slow, original, truncate) = (32.0, 32.0, 1.0, 4096.0, false);
        let yarn = RopeScaling::Yarn { factor, fast, slow, original, attention, truncate, all_dim: 0.0 };
        assert_eq!(oss.rope.unwrap().scaling, yarn);
        assert_eq!(read("gpt_oss", no_scaling).unwrap().rope.unwrap().scaling, RopeScaling::Default);
        let old = json!({"rope_local_base_freq": 20.0, "rope_theta": 30.0, "sliding_window_pattern": 2});
        let gemma3 = read("gemma3_text", old).unwrap();
        assert_eq!((gemma3.rope.unwrap().theta, gemma3.options.local_rope.unwrap().theta), (30.0, 20.0));
        assert_eq!((gemma3.windows[0], gemma3.windows[1]), (Some(4096), None));
        let qwen3 = read("qwen3", json!({"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}));
        assert_eq!(qwen3.unwrap().head_dim, 128);
        let null = read("mistral", json!({"num_key_value_heads": null, "sliding_window": null})).unwrap();
        assert_eq!((null.kv_heads, null.windows[0]), (32, None));
    }
}
