//! Whisper: an encoder of speech and a decoder of text.

use autograd::Var;
use nn::{
    Activation, Conv1d, Conv1dOptions, Embedding, Forward, Init, Initializer, Module, ModuleExt,
    parallel::{CutLayer, Cuts},
};
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, PointwiseOps, ViewOps},
};
use serde_json::{Map, Value, json};

use super::{
    LayerStack, LayerStackConfig, StackMemory, TextDecoder, stack::StackInputs, text_decoder::TextDecoderForm,
};
use crate::{
    config::{ConfigFields, activation_name, check_sizes},
    convert::{ConversionTable, WHISPER},
    encoder::{expect_type, same, written},
    pretrained::Pretrained,
    quantize::quantization,
};

/// The constant added to variances in norms.
const EPS: f64 = 1e-5;

/// Fields of dropout, of noise in training, and of other models on the same encoder.
const UNUSED: [&str; 15] = [
    "activation_dropout",
    "apply_spec_augment",
    "classifier_proj_size",
    "decoder_layerdrop",
    "encoder_layerdrop",
    "forced_decoder_ids",
    "init_std",
    "mask_feature_length",
    "mask_feature_min_masks",
    "mask_feature_prob",
    "mask_time_length",
    "mask_time_min_masks",
    "mask_time_prob",
    "median_filter_width",
    "use_weighted_layer_sum",
];

/// The sizes and options of a [`Whisper`], as `config.json` has them.
#[derive(Clone, Debug, PartialEq)]
pub struct WhisperConfig {
    /// The number of bands of a spectrogram, `M`.
    pub bands: usize,
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The number of channels, `C`.
    pub width: usize,
    /// The number of positions of the encoder, half of those of a spectrogram.
    pub sounds: usize,
    /// The number of positions of the decoder.
    pub context: usize,
    /// The layers, the heads, and the width between the linear layers, of the encoder.
    pub encoder: [usize; 3],
    /// The layers, the heads, and the width between the linear layers, of the decoder.
    pub decoder: [usize; 3],
    /// The activation between the linear layers.
    pub activation: Activation,
    /// True if the head is the token embedding.
    pub tied: bool,
    /// The padding token, whose embedding is not trained but as a part of the head.
    pub padding: Option<usize>,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

impl WhisperConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// Fails if a field is missing, malformed, or unknown and not known to be harmless.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        expect_type(fields, "whisper").at_caller()?;
        fields.require("is_encoder_decoder", true)?;
        // Transformers has the field, and does not compute it.
        fields.require("scale_embedding", false)?;
        fields.leave(&UNUSED);
        let part = |names: [&'static str; 3]| {
            let layers = fields.layers_or(names[0], 4)?;
            Ok::<_, Error>([layers, fields.size_or(names[1], 6)?, fields.size_or(names[2], 1536)?])
        };
        let vocab = fields.size_or("vocab_size", 51_865)?;
        let padding = (!fields.has("pad_token_id")).then_some(50_256);
        let config = WhisperConfig {
            bands: fields.size_or("num_mel_bins", 80)?,
            vocab,
            width: fields.size_or("d_model", 384)?,
            sounds: fields.size_or("max_source_positions", 1500)?,
            context: fields.size_or("max_target_positions", 448)?,
            encoder: part(["encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"]).at_caller()?,
            decoder: part(["decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"]).at_caller()?,
            activation: fields.activation("activation_function", Activation::Gelu)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            padding: fields.row("pad_token_id", vocab)?.or(padding),
            fields: fields.fields().clone(),
        };
        fields.also("num_hidden_layers", "encoder_layers", config.encoder[0]).at_caller()?;
        fields.part("quantization_config")?;
        quantization(fields).at_caller()?;
        fields.finish()?;
        for (name, [_, heads, _]) in
            [("encoder_attention_heads", config.encoder), ("decoder_attention_heads", config.decoder)]
        {
            if heads == 0 || !config.width.is_multiple_of(heads) {
                let why = format_args!("is {heads}, which does not divide {} channels", config.width);
                return Err(fields.wrong(name, why)).at_caller();
            }
        }
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        for (name, value) in [
            ("model_type", json!("whisper")),
            ("architectures", json!(["WhisperForConditionalGeneration"])),
            ("is_encoder_decoder", true.into()),
            ("num_mel_bins", self.bands.into()),
            ("vocab_size", self.vocab.into()),
            ("d_model", self.width.into()),
            ("max_source_positions", self.sounds.into()),
            ("max_target_positions", self.context.into()),
            ("encoder_layers", self.encoder[0].into()),
            ("num_hidden_layers", self.encoder[0].into()),
            ("encoder_attention_heads", self.encoder[1].into()),
            ("encoder_ffn_dim", self.encoder[2].into()),
            ("decoder_layers", self.decoder[0].into()),
            ("decoder_attention_heads", self.decoder[1].into()),
            ("decoder_ffn_dim", self.decoder[2].into()),
            ("activation_function", activation_name(self.activation).into()),
            ("tie_word_embeddings", self.tied.into()),
            ("pad_token_id", json!(self.padding)),
        ] {
            fields.insert(name.into(), value);
        }
        fields
    }

    /// Checks that the fields to be written describe this very model.
    fn check(&self) -> Result<()> {
        let sizes = [("vocab", self.vocab), ("width", self.width), ("bands", self.bands), ("sounds", self.sounds)];
        check_sizes("whisper", &sizes)?;
        check_sizes(
            "whisper",
            &[("encoder", self.encoder[2]), ("decoder", self.decoder[2]), ("context", self.context)],
        )?;
        let again = WhisperConfig { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        same("whisper", &again, self)
    }

    fn layers(&self, [layers, heads, hidden]: [usize; 3], decodes: bool) -> LayerStackConfig {
        LayerStackConfig {
            layers,
            width: self.width,
            heads,
            head_dim: self.width / heads.max(1),
            hidden,
            activation: self.activation,
            gated: false,
            rms: false,
            eps: EPS,
            bias: true,
            key_bias: false,
            scale: None,
            causal: decodes,
            cross: decodes,
            relative: None,
            clamped: !decodes,
        }
    }
}

/// A model of speech and text (Radford et al. 2022): spectrograms `[B, M, 2S]` to text.
///
/// Spectrograms are log-mel, as `WhisperFeatureExtractor` of transformers computes them, of `2S` frames always. There
/// is no dropout: its fields in `config.json` are kept and written back.
#[derive(Debug, Module)]
pub struct Whisper<R: Runtime> {
    /// The first convolution over the frames, from `M` bands.
    pub conv1: Conv1d<R>,
    /// The second, which halves their number.
    pub conv2: Conv1d<R>,
    /// The position embedding of the encoder, `[S, C]`, which is not trained.
    pub embed_positions: Embedding<R>,
    /// The layers of the encoder.
    pub encoder: LayerStack<R>,
    /// The decoder.
    pub decoder: TextDecoder<R>,
    #[module(skip)]
    config: WhisperConfig,
}

impl<R: Runtime> Whisper<R> {
    /// Builds a model of these sizes. Weights are normal with standard deviation 0.02 and biases 0, unless `init` sets
    /// other initializers.
    ///
    /// # Errors
    /// Fails if sizes do not fit each other, or transformers has no such model.
    #[track_caller]
    pub fn new(init: &Init<R>, config: WhisperConfig) -> Result<Self> {
        config.check().at_caller()?;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let (width, options) = (config.width, Conv1dOptions { padding: 1, ..Default::default() });
        let form = TextDecoderForm { positions: Some(config.context), tied: config.tied, scale: 1.0 };
        let table = |rows| Embedding::new(init, rows, width).map(|table| table.with_cuts(Cuts::None));
        let embed_tokens = config.padding.into_iter().try_fold(table(config.vocab)?, Embedding::with_frozen_row)?;
        let embed_positions = table(config.sounds)?;
        embed_positions.weight.set_requires_grad(false);
        let model = Whisper {
            conv1: Conv1d::new(init, config.bands, width, 3, options)?,
            conv2: Conv1d::new(init, width, width, 3, Conv1dOptions { stride: 2, ..options })?,
            embed_positions,
            encoder: LayerStack::new(init, config.layers(config.encoder, false)).at_caller()?,
            decoder: TextDecoder::new(init, embed_tokens, form, config.layers(config.decoder, true)).at_caller()?,
            config,
        };
        // A first pass gives parameters their names, which errors then have.
        model.named_parameters();
        Ok(model)
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &WhisperConfig {
        &self.config
    }

    /// Reads spectrograms `[B, M, 2S]` for the [decoder](Whisper::decoder).
    ///
    /// # Errors
    /// Fails if a spectrogram has another shape.
    #[track_caller]
    pub fn encode(&self, spectrograms: &Var<R>) -> Result<StackMemory<R>> {
        self.decoder.memory(&self.states(spectrograms)?, None)
    }

    /// Computes the encoder's states `[B, S, C]` of spectrograms `[B, M, 2S]`.
    ///
    /// # Errors
    /// Fails if a spectrogram has another shape.
    #[track_caller]
    pub fn states(&self, spectrograms: &Var<R>) -> Result<Var<R>> {
        let (shape, [bands, frames]) = (spectrograms.spec().shape, [self.config.bands, 2 * self.config.sounds]);
        if shape.rank() != 3 || shape[1..] != [bands, frames] {
            let why = format!("spectrograms must be [B, {bands}, {frames}]: fill shorter ones up with silence");
            return Err(Error::shape("whisper", &[shape], why)).at_caller();
        }
        let x = self.conv1.forward(spectrograms).within("conv1").at_caller()?.gelu()?;
        let x = self.conv2.forward(&x).within("conv2").at_caller()?.gelu()?.transpose(1, 2)?;
        let x = x.add(&self.embed_positions.weight.var())?;
        self.encoder.forward_with(&x, StackInputs::default()).within("encoder").at_caller()
    }
}

impl<R: Runtime> Pretrained<R> for Whisper<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        Whisper::new(init, WhisperConfig::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        WHISPER
    }

    fn does_without(&self, parameter: &str) -> bool {
        self.tied_to(parameter).is_some()
    }

    fn tied_to(&self, parameter: &str) -> Option<&'static str> {
        (self.config.tied && parameter == "decoder.head.weight").then_some("decoder.embed_tokens.weight")
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
