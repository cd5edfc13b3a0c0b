//! The sizes and options of CLIP, as `config.json` has them.

use nn::Activation;
use numcore::{Result, Within};
use serde_json::{Map, Value, json};

use crate::{
    config::{ConfigFields, activation_name, check_sizes},
    encoder::{expect_type, same, written},
    files::JsonObject,
    quantize::quantization,
    seq2seq::LayerStackConfig,
};

/// The sizes and options of a [`Clip`](super::Clip).
#[derive(Clone, Debug, PartialEq)]
pub struct ClipConfig {
    /// The layers of the text tower.
    pub text: ClipTower,
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The longest text, in tokens.
    pub context: usize,
    /// The token whose state stands for a text; the largest token of the text if `None`.
    pub end: Option<usize>,
    /// The layers of the image tower.
    pub image: ClipTower,
    /// The number of channels of an image, `K`.
    pub channels: usize,
    /// The height and width of an image, in pixels.
    pub size: usize,
    /// The height and width of a patch in pixels, which divide those of the image.
    pub patch: usize,
    /// The width of the space of texts and images, `P`.
    pub projection: usize,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

/// The sizes and options of the layers of a tower of CLIP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipTower {
    /// The number of layers.
    pub layers: usize,
    /// The number of channels, `C`.
    pub width: usize,
    /// The number of heads, which divides `width`.
    pub heads: usize,
    /// The width between the linear layers.
    pub hidden: usize,
    /// The activation between the linear layers.
    pub activation: Activation,
    /// The constant added to variances in norms.
    pub eps: f64,
}

impl ClipTower {
    fn read(fields: &ConfigFields, [width, hidden, heads]: [usize; 3]) -> Result<Self> {
        // Fields of initial values, and of heads that towers do not have; the outer `projection_dim` is read.
        fields.leave(&["initializer_factor", "projection_dim", "tie_word_embeddings"]);
        let tower = ClipTower {
            layers: fields.layers_or("num_hidden_layers", 12)?,
            width: fields.size_or("hidden_size", width)?,
            heads: fields.size_or("num_attention_heads", heads)?,
            hidden: fields.size_or("intermediate_size", hidden)?,
            activation: fields.activation("hidden_act", Activation::QuickGelu)?,
            eps: fields.number_or("layer_norm_eps", 1e-5)?,
        };
        if tower.heads == 0 || !tower.width.is_multiple_of(tower.heads) {
            let why = format_args!("is {}, which does not divide {} channels", tower.heads, tower.width);
            return Err(fields.wrong("num_attention_heads", why));
        }
        Ok(tower)
    }

    fn insert_into(&self, fields: &mut Map<String, Value>) {
        for (name, size) in [
            ("num_hidden_layers", self.layers),
            ("hidden_size", self.width),
            ("num_attention_heads", self.heads),
            ("intermediate_size", self.hidden),
        ] {
            fields.insert(name.into(), size.into());
        }
        fields.insert("hidden_act".into(), activation_name(self.activation).into());
        fields.insert("layer_norm_eps".into(), json!(self.eps));
    }

    /// The layers of a tower.
    pub(super) fn stack(&self, causal: bool) -> LayerStackConfig {
        LayerStackConfig {
            layers: self.layers,
            width: self.width,
            heads: self.heads,
            head_dim: self.width / self.heads.max(1),
            hidden: self.hidden,
            activation: self.activation,
            gated: false,
            rms: false,
            eps: self.eps,
            bias: true,
            key_bias: true,
            scale: None,
            causal,
            cross: false,
            relative: None,
            clamped: false,
        }
    }
}

/// The fields of a tower. An object of older versions stands for the whole object, if it is there.
fn tower(fields: &ConfigFields, name: &'static str, old: &'static str, kind: &str) -> Result<ConfigFields> {
    let none = || JsonObject::of(format!("config.json: `{name}`"), Map::new());
    let tower = ConfigFields::of(match (fields.part(name)?, fields.part(old)?) {
        (_, Some(old)) => old,
        (new, None) => new.unwrap_or_else(none),
    });
    match tower.text("model_type")? {
        Some(other) if other != kind => Err(tower.wrong("model_type", format_args!("is `{other}`, not `{kind}`"))),
        _ => Ok(tower),
    }
}

impl ClipConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// Fails if a field is missing, malformed, or unknown and not known to be harmless, or patches do not divide the
    /// image.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        expect_type(fields, "clip").at_caller()?;
        let text = tower(fields, "text_config", "text_config_dict", "clip_text_model").at_caller()?;
        let image = tower(fields, "vision_config", "vision_config_dict", "clip_vision_model").at_caller()?;
        // The first value of a parameter that files have.
        fields.leave(&["logit_scale_init_value", "initializer_factor", "tie_word_embeddings"]);
        let end = text.size_or("eos_token_id", 49_407)?;
        let config = ClipConfig {
            text: ClipTower::read(&text, [512, 2048, 8]).at_caller()?,
            vocab: text.size_or("vocab_size", 49_408)?,
            context: text.size_or("max_position_embeddings", 77)?,
            // Files of older versions say 2, and mean the largest.
            end: (end != 2).then_some(end),
            image: ClipTower::read(&image, [768, 3072, 12]).at_caller()?,
            channels: image.size_or("num_channels", 3)?,
            size: image.size_or("image_size", 224)?,
            patch: image.size_or("patch_size", 32)?,
            projection: fields.size_or("projection_dim", 512)?,
            fields: fields.fields().clone(),
        };
        fields.part("quantization_config")?;
        quantization(fields).at_caller()?;
        [&text, &image, fields].into_iter().try_for_each(ConfigFields::finish).at_caller()?;
        if config.patch == 0 || !config.size.is_multiple_of(config.patch) {
            let why = format_args!("is {}, which does not divide images of {}", config.patch, config.size);
            return Err(image.wrong("patch_size", why)).at_caller();
        }
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        let mut tower = |name: &str, kind: &str, tower: &ClipTower, sizes: [(&str, usize); 3]| {
            fields.remove(&format!("{name}_dict"));
            let own = fields.entry(name).or_insert_with(|| Value::Object(Map::new()));
            if !own.is_object() {
                *own = Value::Object(Map::new());
            }
            if let Some(own) = own.as_object_mut() {
                tower.insert_into(own);
                own.insert("model_type".into(), kind.into());
                own.extend(sizes.map(|(name, size)| (name.into(), size.into())));
            }
        };
        let end = self.end.unwrap_or(2);
        let sizes = [("vocab_size", self.vocab), ("max_position_embeddings", self.context), ("eos_token_id", end)];
        tower("text_config", "clip_text_model", &self.text, sizes);
        let sizes = [("num_channels", self.channels), ("image_size", self.size), ("patch_size", self.patch)];
        tower("vision_config", "clip_vision_model", &self.image, sizes);
        fields.insert("model_type".into(), "clip".into());
        fields.insert("architectures".into(), json!(["CLIPModel"]));
        fields.insert("projection_dim".into(), self.projection.into());
        fields
    }

    /// Checks that the fields to be written describe this very model.
    pub(super) fn check(&self) -> Result<()> {
        for (what, tower) in [("text", &self.text), ("image", &self.image)] {
            check_sizes("clip", &[(what, tower.width.max(tower.hidden).max(tower.heads))])?;
        }
        check_sizes("clip", &[("vocab", self.vocab), ("size", self.size), ("projection", self.projection)])?;
        let again = ClipConfig { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        same("clip", &again, self)
    }
}
