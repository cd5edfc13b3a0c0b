//! ViT: an encoder of images.

use autograd::Var;
use nn::{
    Conv2d, ConvOptions, EncoderBlock, EncoderBlockConfig, Forward, Init, Initializer, LayerNorm, Linear, Module,
    ModuleExt, Param,
};
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, PointwiseOps, ViewOps, cat},
};
use serde_json::{Map, Value, json};

use super::bert_config::{block, expect_type, labels, same, with_block, with_labels, written};
use crate::{
    config::{ConfigFields, check_sizes},
    convert::{ConversionTable, VIT},
    pretrained::Pretrained,
    quantize::quantization,
};

/// The sizes and options of a [`Vit`], as `config.json` has them.
#[derive(Clone, Debug, PartialEq)]
pub struct VitConfig {
    /// The height and width of an image, in pixels.
    pub image: usize,
    /// The height and width of a patch in pixels, which divide those of the image.
    pub patch: usize,
    /// The number of channels of an image, `K`.
    pub channels: usize,
    /// The number of layers.
    pub layers: usize,
    /// The sizes and options of a layer.
    pub block: EncoderBlockConfig,
    /// The number of classes, `N`.
    pub labels: usize,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

impl VitConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// Fails if a field is missing, malformed, or unknown and not known to be harmless, or patches do not divide the
    /// image.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        expect_type(fields, "vit").at_caller()?;
        let qkv_bias = fields.flag_or("qkv_bias", true)?;
        let config = VitConfig {
            image: fields.side_or("image_size", 224)?,
            patch: fields.side_or("patch_size", 16)?,
            channels: fields.size_or("num_channels", 3)?,
            layers: fields.layers_or("num_hidden_layers", 12)?,
            block: block(fields, true, qkv_bias).at_caller()?,
            labels: labels(fields).at_caller()?,
            fields: fields.fields().clone(),
        };
        fields.part("quantization_config")?;
        quantization(fields).at_caller()?;
        fields.finish()?;
        if config.patch == 0 || !config.image.is_multiple_of(config.patch) {
            let why = format!("is {}, which does not divide images of {}", config.patch, config.image);
            return Err(fields.wrong("patch_size", why)).at_caller();
        }
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = with_block(self.fields.clone(), "vit", &self.block, self.layers);
        fields.insert("architectures".into(), json!(["ViTForImageClassification"]));
        fields.insert("image_size".into(), self.image.into());
        fields.insert("patch_size".into(), self.patch.into());
        fields.insert("num_channels".into(), self.channels.into());
        fields.insert("qkv_bias".into(), self.block.qkv_bias.into());
        with_labels(fields, self.labels)
    }

    /// Checks that the fields to be written describe this very model.
    fn check(&self) -> Result<()> {
        let mut again = VitConfig { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        again.block.dropout = self.block.dropout;
        same("vit", &again, self)
    }
}

/// A classifier of images (Dosovitskiy et al. 2021): `[B, K, H, W]` to logits `[B, N]`.
#[derive(Debug, Module)]
pub struct Vit<R: Runtime> {
    /// The class token before the patches, `[1, 1, C]`, whose state the classifier reads.
    pub cls_token: Param<R>,
    /// The position embedding, `[1, 1 + patches, C]`.
    pub positions: Param<R>,
    /// The projection of patches to `C` channels.
    pub patches: Conv2d<R>,
    /// The layers, in order.
    pub layers: Vec<EncoderBlock<R>>,
    /// The norm before the classifier.
    pub norm: LayerNorm<R>,
    /// The projection to logits of classes.
    pub classifier: Linear<R>,
    #[module(skip)]
    config: VitConfig,
}

impl<R: Runtime> Vit<R> {
    /// Builds a model of these sizes. Weights are normal with standard deviation 0.02 and biases 0, unless `init` sets
    /// other initializers.
    ///
    /// # Errors
    /// Fails if sizes do not fit each other, or transformers has no such model.
    #[track_caller]
    pub fn new(init: &Init<R>, config: VitConfig) -> Result<Self> {
        check_sizes("vit", &[("image", config.image), ("width", config.block.width), ("labels", config.labels)])
            .at_caller()?;
        config.check().at_caller()?;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let (width, per_side) = (config.block.width, config.image / config.patch.max(1));
        let small = Initializer::Normal { mean: 0.0, std: 0.02 };
        let options = ConvOptions { stride: [config.patch; 2], ..Default::default() };
        let model = Vit {
            cls_token: init.param([1, 1, width], small).at_caller()?,
            positions: init.param([1, 1 + per_side * per_side, width], small).at_caller()?,
            patches: Conv2d::new(init, config.channels, width, [config.patch; 2], options)?,
            layers: (0..config.layers)
                .map(|_| EncoderBlock::new(init, config.block))
                .collect::<Result<_>>()
                .at_caller()?,
            norm: LayerNorm { eps: config.block.eps, ..LayerNorm::new(init, width)? },
            classifier: Linear::new(init, width, config.labels)?,
            config,
        };
        // A first pass gives parameters their names, which errors then have.
        model.named_parameters();
        Ok(model)
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &VitConfig {
        &self.config
    }

    /// Computes the normalized states `[B, 1 + patches, C]` of images `[B, K, H, W]`.
    ///
    /// # Errors
    /// Fails if the image has another size than the model's.
    #[track_caller]
    pub fn states(&self, pixels: &Var<R>) -> Result<Var<R>> {
        let (shape, size) = (pixels.spec().shape, self.config.image);
        if shape.rank() != 4 || shape[1..] != [self.config.channels, size, size] {
            let why = format!("images must be [B, {}, {size}, {size}]", self.config.channels);
            return Err(Error::shape("vit", &[shape], why)).at_caller();
        }
        let patches = self.patches.forward(pixels).within("patches")?.flatten(2, 3)?.transpose(1, 2)?;
        let first = self.cls_token.var().broadcast_to([shape[0], 1, self.config.block.width])?;
        let mut x = cat(&[&first, &patches], 1)?.add(&self.positions.var())?;
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x).within(format_args!("layers.{i}")).at_caller()?;
        }
        self.norm.forward(&x).within("norm")
    }
}

impl<R: Runtime> Forward<R> for Vit<R> {
    fn forward(&self, pixels: &Var<R>) -> Result<Var<R>> {
        self.classifier.forward(&self.states(pixels)?.select(1, 0)?).within("classifier")
    }
}

impl<R: Runtime> Pretrained<R> for Vit<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        Vit::new(init, VitConfig::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        VIT
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
