//! The sizes and options of CLIP, as `config.json` has them.

use nn::Activation;
use numcore::{Error, Result, Within};
use serde_json::{Map, Value, json};

use crate::{
    config::{ConfigFields, activation_name, check_sizes},
    encoder::{expect_type, same, written},
    files::JsonObject,
    quantize::quantization,
    seq2seq::LayerStackConfig,
};

/// The sizes and options of a [`Clip`](super::Clip). One of the towers may be absent.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipConfig {
    /// The tower of texts.
    pub text: Option<ClipTextConfig>,
    /// The tower of images.
    pub image: Option<ClipImageConfig>,
    /// The width of the space of texts and images, `P`; `None` for a lone tower without a projection.
    pub projection: Option<usize>,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

/// The sizes and options of the tower of texts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipTextConfig {
    /// The layers.
    pub tower: ClipTower,
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The longest text, in tokens.
    pub context: usize,
    /// The token whose state stands for a text; the largest token of the text if `None`.
    pub end: Option<usize>,
}

/// The sizes and options of the tower of images.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipImageConfig {
    /// The layers.
    pub tower: ClipTower,
    /// The number of channels of an image, `K`.
    pub channels: usize,
    /// The height and width of an image, in pixels.
    pub size: usize,
    /// The height and width of a patch in pixels, which divide those of the image.
    pub patch: usize,
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
        // Fields of initial values, and of heads that towers do not have.
        fields.leave(&["initializer_factor", "tie_word_embeddings"]);
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

impl ClipTextConfig {
    fn read(fields: &ConfigFields) -> Result<Self> {
        if fields.get("eos_token_id").is_some_and(Value::is_array) {
            let why = "is a list, of which transformers computes nothing: give the one token that ends texts";
            return Err(fields.wrong("eos_token_id", why));
        }
        let end = fields.size_or("eos_token_id", 49_407)?;
        Ok(ClipTextConfig {
            tower: ClipTower::read(fields, [512, 2048, 8])?,
            vocab: fields.size_or("vocab_size", 49_408)?,
            context: fields.size_or("max_position_embeddings", 77)?,
            // Files of older versions say 2, and mean the largest.
            end: (end != 2).then_some(end),
        })
    }

    fn insert_into(&self, fields: &mut Map<String, Value>) {
        self.tower.insert_into(fields);
        let end = self.end.unwrap_or(2);
        let sizes = [("vocab_size", self.vocab), ("max_position_embeddings", self.context), ("eos_token_id", end)];
        fields.extend(sizes.map(|(name, size)| (name.into(), size.into())));
    }
}

impl ClipImageConfig {
    fn read(fields: &ConfigFields) -> Result<Self> {
        let config = ClipImageConfig {
            tower: ClipTower::read(fields, [768, 3072, 12])?,
            channels: fields.size_or("num_channels", 3)?,
            size: fields.size_or("image_size", 224)?,
            patch: fields.size_or("patch_size", 32)?,
        };
        if config.patch == 0 || !config.size.is_multiple_of(config.patch) {
            let why = format_args!("is {}, which does not divide images of {}", config.patch, config.size);
            return Err(fields.wrong("patch_size", why));
        }
        Ok(config)
    }

    fn insert_into(&self, fields: &mut Map<String, Value>) {
        self.tower.insert_into(fields);
        let sizes = [("num_channels", self.channels), ("image_size", self.size), ("patch_size", self.patch)];
        fields.extend(sizes.map(|(name, size)| (name.into(), size.into())));
    }
}

/// The names of the object of a tower of a whole model, of that of older versions, and of a tower's `model_type`.
const TEXT: [&str; 3] = ["text_config", "text_config_dict", "clip_text_model"];
const IMAGE: [&str; 3] = ["vision_config", "vision_config_dict", "clip_vision_model"];

/// The fields of a tower. An object of older versions stands for the whole object, if it is there.
fn tower(fields: &ConfigFields, [name, old, kind]: [&'static str; 3]) -> Result<ConfigFields> {
    let none = || JsonObject::of(format!("config.json: `{name}`"), Map::new());
    let tower = ConfigFields::of(match (fields.part(name)?, fields.part(old)?) {
        (_, Some(old)) => old,
        (new, None) => new.unwrap_or_else(none),
    });
    // The outer field is read.
    tower.leave(&["projection_dim"]);
    match tower.text("model_type")? {
        Some(other) if other != kind => Err(tower.wrong("model_type", format_args!("is `{other}`, not `{kind}`"))),
        _ => Ok(tower),
    }
}

impl ClipConfig {
    /// Reads the fields of a `config.json` of a whole model, or of a tower. The first of `architectures` tells whether
    /// a lone tower has a projection.
    ///
    /// # Errors
    /// Fails if a field is missing, malformed, or unknown and not known to be harmless, or patches do not divide the
    /// image.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        let architecture = fields.list("architectures")?.and_then(|names| names.first().copied());
        let projects = architecture.is_some_and(|name| name.ends_with("WithProjection"));
        let alone = |text, image| {
            let width = fields.size_or("projection_dim", 512)?;
            Ok::<_, Error>(ClipConfig { text, image, projection: projects.then_some(width), fields: Map::new() })
        };
        let config = match fields.text("model_type")? {
            Some(kind) if kind == TEXT[2] => alone(Some(ClipTextConfig::read(fields).at_caller()?), None)?,
            Some(kind) if kind == IMAGE[2] => alone(None, Some(ClipImageConfig::read(fields).at_caller()?))?,
            _ => {
                expect_type(fields, "clip").at_caller()?;
                let (text, image) = (tower(fields, TEXT).at_caller()?, tower(fields, IMAGE).at_caller()?);
                // The first value of a parameter that files have.
                fields.leave(&["logit_scale_init_value", "initializer_factor", "tie_word_embeddings"]);
                let config = ClipConfig {
                    text: Some(ClipTextConfig::read(&text).at_caller()?),
                    image: Some(ClipImageConfig::read(&image).at_caller()?),
                    projection: Some(fields.size_or("projection_dim", 512)?),
                    fields: Map::new(),
                };
                [&text, &image].into_iter().try_for_each(ConfigFields::finish).at_caller()?;
                config
            }
        };
        fields.part("quantization_config")?;
        quantization(fields).at_caller()?;
        fields.finish().at_caller()?;
        Ok(ClipConfig { fields: fields.fields().clone(), ..config })
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        let (kind, architecture) = match (&self.text, &self.image) {
            (Some(text), None) => {
                text.insert_into(&mut fields);
                (TEXT[2], "CLIPTextModel")
            }
            (None, Some(image)) => {
                image.insert_into(&mut fields);
                (IMAGE[2], "CLIPVisionModel")
            }
            (text, image) => {
                let mut inner = |[name, old, kind]: [&str; 3], insert: &dyn Fn(&mut Map<String, Value>)| {
                    fields.remove(old);
                    let own = fields.entry(name).or_insert_with(|| Value::Object(Map::new()));
                    if !own.is_object() {
                        *own = Value::Object(Map::new());
                    }
                    if let Some(own) = own.as_object_mut() {
                        insert(own);
                        own.insert("model_type".into(), kind.into());
                    }
                };
                inner(TEXT, &|own| text.iter().for_each(|text| text.insert_into(own)));
                inner(IMAGE, &|own| image.iter().for_each(|image| image.insert_into(own)));
                ("clip", "CLIPModel")
            }
        };
        let projects = if kind != "clip" && self.projection.is_some() { "WithProjection" } else { "" };
        fields.insert("model_type".into(), kind.into());
        fields.insert("architectures".into(), json!([format!("{architecture}{projects}")]));
        if let Some(width) = self.projection {
            fields.insert("projection_dim".into(), width.into());
        }
        fields
    }

    /// Checks that the fields to be written describe this very model.
    pub(super) fn check(&self) -> Result<()> {
        let (text, image) = (self.text.iter(), self.image.iter());
        let towers = text.clone().map(|text| text.tower).chain(image.clone().map(|image| image.tower));
        let towers = towers.flat_map(|tower| [tower.width, tower.hidden, tower.heads]);
        let own = text.map(|text| text.vocab).chain(image.map(|image| image.size)).chain(self.projection);
        towers.chain(own).try_for_each(|size| check_sizes("clip", &[("size", size)]))?;
        let again = ClipConfig { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        same("clip", &again, self)
    }
}
