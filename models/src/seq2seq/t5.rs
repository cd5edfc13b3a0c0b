//! T5: an encoder–decoder of text.

use autograd::Var;
use nn::{
    Activation, Embedding, Forward, Init, Initializer, Module, ModuleExt,
    parallel::{CutLayer, Cuts},
};
use numcore::{DType, Error, Result, Runtime, Within, ops::Apply};
use serde_json::{Map, Value, json};

use super::{
    LayerStack, LayerStackConfig, RelativeConfig, StackMemory, TextDecoder,
    stack::StackInputs,
    text_decoder::{TextDecoderForm, seen_keys},
};
use crate::{
    config::{ConfigFields, activation_name, check_sizes},
    convert::{ConversionTable, T5 as PLAIN, T5_GATED},
    encoder::{expect_type, same, written},
    pretrained::Pretrained,
    quantize::quantization,
};

/// The sizes and options of a [`T5`], as `config.json` has them.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// True for mT5, which has other defaults, and whose head takes states as they are.
    pub multilingual: bool,
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The number of channels, `C`.
    pub width: usize,
    /// The number of layers of the encoder.
    pub encoder_layers: usize,
    /// The number of layers of the decoder; `None` for an encoder alone.
    pub decoder_layers: Option<usize>,
    /// The number of heads.
    pub heads: usize,
    /// The width of a head.
    pub head_dim: usize,
    /// The width between the linear layers.
    pub hidden: usize,
    /// The activation between the linear layers.
    pub activation: Activation,
    /// True if the linear layers have a gate (T5 1.1).
    pub gated: bool,
    /// The buckets of distances.
    pub relative: RelativeConfig,
    /// The constant added to mean squares in norms.
    pub eps: f64,
    /// True if the head is the token embedding (T5); false for a head of its own (T5 1.1).
    pub tied: bool,
    /// True if the head takes states over `√C` (T5; never mT5).
    pub scaled: bool,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

impl T5Config {
    /// Reads the fields of a `config.json`. Where weights are loaded, they tell whether the head is tied, as in
    /// transformers 5. `tie_word_embeddings` is false of T5 1.1, and may be true of any head. The first of
    /// `architectures` tells whether there is a decoder.
    ///
    /// # Errors
    /// Fails if a field is missing, malformed, or unknown and not known to be harmless.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        let multilingual = fields.text("model_type")? == Some("mt5");
        expect_type(fields, if multilingual { "mt5" } else { "t5" }).at_caller()?;
        let architecture = fields.list("architectures")?.and_then(|names| names.first().copied());
        let decodes = !architecture.is_some_and(|name| name.ends_with("EncoderModel"));
        match decodes {
            true => fields.require("is_encoder_decoder", true)?,
            // Some files of encoders say true.
            false => fields.leave(&["is_encoder_decoder", "num_decoder_layers"]),
        }
        fields.require("is_decoder", false)?;
        // Fields of older versions, and of initial values and dropout.
        fields.maybe_size("n_positions")?;
        fields.maybe_number("dropout_rate")?;
        fields.maybe_number("initializer_factor")?;
        let own = if multilingual { "gated-gelu" } else { "relu" };
        let (gated, activation) = feed_forward(fields, own).at_caller()?;
        let [vocab, layers, heads, hidden] = if multilingual { [250_112, 8, 6, 1024] } else { [32_128, 6, 8, 2048] };
        let encoder_layers = fields.layers_or("num_layers", layers)?;
        let tied = fields.flag_or("tie_word_embeddings", true)?;
        let config = T5Config {
            multilingual,
            vocab: fields.size_or("vocab_size", vocab)?,
            width: fields.size_or("d_model", 512)?,
            encoder_layers,
            decoder_layers: match decodes {
                true => Some(fields.layers_or("num_decoder_layers", encoder_layers)?),
                false => None,
            },
            heads: fields.size_or("num_heads", heads)?,
            head_dim: fields.size_or("d_kv", 64)?,
            hidden: fields.size_or("d_ff", hidden)?,
            activation,
            gated,
            relative: RelativeConfig {
                buckets: fields.size_or("relative_attention_num_buckets", 32)?,
                distance: fields.size_or("relative_attention_max_distance", 128)?,
            },
            eps: fields.number_or("layer_norm_epsilon", 1e-6)?,
            tied: is_tied(fields, tied).at_caller()?,
            // Transformers 5 writes that all models are tied, and of T5 1.1 this.
            scaled: !multilingual && fields.flag_or("scale_decoder_outputs", tied)?,
            fields: fields.fields().clone(),
        };
        fields.part("quantization_config")?;
        quantization(fields).at_caller()?;
        fields.finish()?;
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        let name = if self.activation == Activation::GeluTanh && self.gated {
            "gelu"
        } else {
            activation_name(self.activation)
        };
        let gate = if self.gated { "gated-" } else { "" };
        let family = if self.multilingual { "mt5" } else { "t5" };
        let kind = if self.decoder_layers.is_some() { "ForConditionalGeneration" } else { "EncoderModel" };
        for (name, value) in [
            ("model_type", json!(family)),
            ("architectures", json!([family.to_uppercase() + kind])),
            ("is_encoder_decoder", self.decoder_layers.is_some().into()),
            ("vocab_size", self.vocab.into()),
            ("d_model", self.width.into()),
            ("num_layers", self.encoder_layers.into()),
            ("num_heads", self.heads.into()),
            ("d_kv", self.head_dim.into()),
            ("d_ff", self.hidden.into()),
            ("feed_forward_proj", format!("{gate}{name}").into()),
            ("dense_act_fn", activation_name(self.activation).into()),
            ("is_gated_act", self.gated.into()),
            ("relative_attention_num_buckets", self.relative.buckets.into()),
            ("relative_attention_max_distance", self.relative.distance.into()),
            ("layer_norm_epsilon", json!(self.eps)),
            ("tie_word_embeddings", self.tied.into()),
        ] {
            fields.insert(name.into(), value);
        }
        fields.extend(self.decoder_layers.map(|layers| ("num_decoder_layers".into(), layers.into())));
        if !self.multilingual {
            fields.insert("scale_decoder_outputs".into(), self.scaled.into());
        }
        fields
    }

    /// Checks that the fields to be written describe this very model.
    fn check(&self) -> Result<()> {
        let sizes = [("vocab", self.vocab), ("width", self.width), ("hidden", self.hidden), ("heads", self.heads)];
        check_sizes("t5", &sizes)?;
        check_sizes("t5", &[("head_dim", self.head_dim), ("buckets", self.relative.buckets)])?;
        let again = T5Config { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        same("t5", &again, self)
    }

    /// The layers of the encoder, or those of the decoder.
    fn layers(&self, layers: usize, decodes: bool) -> LayerStackConfig {
        LayerStackConfig {
            layers,
            width: self.width,
            heads: self.heads,
            head_dim: self.head_dim,
            hidden: self.hidden,
            activation: self.activation,
            gated: self.gated,
            rms: true,
            eps: self.eps,
            bias: false,
            key_bias: false,
            scale: Some(1.0),
            causal: decodes,
            cross: decodes,
            relative: Some(self.relative),
            clamped: false,
        }
    }
}

/// Tells whether the head is the token embedding: if weights are known, unless they have a head that differs from it.
/// `says` is what the field says.
fn is_tied(fields: &ConfigFields, says: bool) -> Result<bool> {
    const TABLES: [&str; 3] = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];
    let Some(weights) = fields.weights() else { return Ok(says) };
    let table = TABLES.into_iter().find(|name| weights.has(name));
    match table.filter(|_| weights.has("lm_head.weight")) {
        Some(table) => Ok(says && weights.same("lm_head.weight", table)?),
        None => Ok(true),
    }
}

/// The gate and the activation that `feed_forward_proj` names, as in `gated-gelu`.
fn feed_forward(fields: &ConfigFields, default: &str) -> Result<(bool, Activation)> {
    let text = fields.text_or("feed_forward_proj", default)?;
    let (gated, name) = text.strip_prefix("gated-").map_or((false, text), |name| (true, name));
    let activation = match (gated, name) {
        (_, "relu") => Activation::Relu,
        // A gate goes through the approximation by this name.
        (true, "gelu") => Activation::GeluTanh,
        (false, "gelu") => Activation::Gelu,
        (false, "gelu_new") => Activation::GeluTanh,
        (_, "silu" | "swish") => Activation::Silu,
        _ => return Err(fields.wrong("feed_forward_proj", format_args!("is `{text}`, which is not known"))),
    };
    // Fields that transformers writes, and computes from the other.
    let written = (fields.flag_or("is_gated_act", gated)?, fields.activation("dense_act_fn", activation)?);
    if written != (gated, activation) {
        return Err(fields.wrong(
            "feed_forward_proj",
            format_args!("is `{text}`, which `dense_act_fn` and `is_gated_act` contradict"),
        ));
    }
    Ok(written)
}

/// An encoder–decoder of text (Raffel et al. 2020): T5, T5 1.1, Flan-T5 and mT5; or the encoder alone.
///
/// There is no dropout: its fields in `config.json` are kept and written back.
#[derive(Debug, Module)]
pub struct T5<R: Runtime> {
    /// The token embedding of the encoder and the decoder, `[V, C]`.
    pub embed_tokens: Embedding<R>,
    /// The layers of the encoder.
    pub encoder: LayerStack<R>,
    /// The decoder, unless this is an encoder alone.
    pub decoder: Option<TextDecoder<R>>,
    #[module(skip)]
    config: T5Config,
}

impl<R: Runtime> T5<R> {
    /// Builds a model of these sizes. Weights are normal with standard deviation 0.02, unless `init` sets another
    /// initializer.
    ///
    /// # Errors
    /// Fails if sizes do not fit each other, or transformers has no such model.
    #[track_caller]
    pub fn new(init: &Init<R>, config: T5Config) -> Result<Self> {
        config.check().at_caller()?;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let scale = if config.scaled { 1.0 / (config.width as f64).sqrt() } else { 1.0 };
        let form = TextDecoderForm { positions: None, tied: config.tied, scale };
        let embed_tokens = Embedding::new(init, config.vocab, config.width)?.with_cuts(Cuts::None);
        let decoder = |layers| {
            let table = Embedding::of(embed_tokens.weight.clone());
            TextDecoder::new(init, table, form, config.layers(layers, true))
        };
        let model = T5 {
            encoder: LayerStack::new(init, config.layers(config.encoder_layers, false)).at_caller()?,
            decoder: config.decoder_layers.map(decoder).transpose().at_caller()?,
            embed_tokens,
            config,
        };
        // A first pass gives parameters their names, which errors then have.
        model.named_parameters();
        Ok(model)
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &T5Config {
        &self.config
    }

    /// The decoder.
    ///
    /// # Errors
    /// Fails if this is an encoder alone.
    #[track_caller]
    pub fn decoder(&self) -> Result<&TextDecoder<R>> {
        let why = "is an encoder alone, without a decoder: call `states`, or load a whole model";
        self.decoder.as_ref().ok_or_else(|| Error::state("t5", why)).at_caller()
    }

    /// Reads a text, tokens `[B, S]` (`i64`), for the [decoder](T5::decoder). `mask`, `[B, S]`, of `bool` or numbers,
    /// is 0 for padding.
    ///
    /// # Errors
    /// Fails if shapes do not fit, weights are in `f16`, or this is an encoder alone.
    #[track_caller]
    pub fn encode(&self, tokens: &Var<R>, mask: Option<&Var<R>>) -> Result<StackMemory<R>> {
        self.decoder()?.memory(&self.states(tokens, mask)?, mask)
    }

    /// Computes the encoder's states `[B, S, C]` of tokens `[B, S]`.
    ///
    /// # Errors
    /// Fails if shapes do not fit, or weights are in `f16`.
    #[track_caller]
    pub fn states(&self, tokens: &Var<R>, mask: Option<&Var<R>>) -> Result<Var<R>> {
        let shape = tokens.spec().shape;
        if shape.rank() != 2 {
            return Err(Error::shape("t5", &[shape], "tokens must be [B, S]")).at_caller();
        }
        let x = self.embed_tokens.forward(tokens).within("embed_tokens").at_caller()?;
        if x.dtype() == DType::F16 {
            let why = "states of T5 pass the largest number of f16: load the model in bf16 or f32";
            return Err(Error::unsupported("t5", why)).at_caller();
        }
        let seen = mask.map(seen_keys).transpose().at_caller()?;
        let inputs = StackInputs { mask: seen.as_ref(), ..Default::default() };
        self.encoder.forward_with(&x, inputs).within("encoder").at_caller()
    }
}

impl<R: Runtime> Pretrained<R> for T5<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        T5::new(init, T5Config::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        if self.config.gated { T5_GATED } else { PLAIN }
    }

    fn does_without(&self, parameter: &str) -> bool {
        self.tied_to(parameter).is_some()
    }

    fn tied_to(&self, parameter: &str) -> Option<&'static str> {
        let copies = ["encoder.embed_tokens.weight", "decoder.own_tokens.weight"];
        let is_copy = copies.contains(&parameter) || self.config.tied && parameter == "decoder.head.weight";
        is_copy.then_some("embed_tokens.weight")
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
