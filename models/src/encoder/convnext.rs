//! ConvNeXt: wide convolutions of each channel by itself, for classes of images.

use autograd::Var;
use nn::{Activation, Conv2d, ConvOptions, Forward, Init, Initializer, LayerNorm, Linear, Module, ModuleExt, Param};
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
};
use serde_json::{Map, Value, json};

use super::{
    bert_config::{expect_type, labels, same, with_labels, written},
    resnet::stages,
};
use crate::{
    config::{ConfigFields, activation_name, check_sizes},
    convert::{CONVNEXT, ConversionTable},
    pretrained::Pretrained,
};

/// The constant added to variances in all norms but the last.
const EPS: f64 = 1e-6;

/// The sizes and options of a [`ConvNext`], as `config.json` has them.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvNextConfig {
    /// The number of channels of an image, `K`.
    pub channels: usize,
    /// The height and width of a patch, in pixels.
    pub patch: usize,
    /// The number of channels of each stage.
    pub widths: Vec<usize>,
    /// The number of layers of each stage.
    pub depths: Vec<usize>,
    /// The activation between the linear layers.
    pub activation: Activation,
    /// The constant added to variances in the last norm.
    pub eps: f64,
    /// The first value of the scale of each channel's output; no scale if it is 0.
    pub layer_scale: f64,
    /// The number of classes, `N`.
    pub labels: usize,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

impl ConvNextConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// Fails if a field is missing, malformed, or unknown and not known to be harmless.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        expect_type(fields, "convnext").at_caller()?;
        let [widths, depths] = stages(fields, [96, 192, 384, 768], [3, 3, 9, 3]).at_caller()?;
        let count = fields.maybe_size("num_hidden_layers")?.unwrap_or(4);
        let count = fields.size_or("num_stages", count)?;
        fields.also("num_hidden_layers", "num_stages", count).at_caller()?;
        if count != depths.len() {
            let why = format_args!("is {count}, and `depths` has {}", depths.len());
            return Err(fields.wrong("num_stages", why)).at_caller();
        }
        // Layers are left out by chance in training alone, and no part of a model here; images may have any size.
        fields.number_or("drop_path_rate", 0.0)?;
        fields.side_or("image_size", 224)?;
        let config = ConvNextConfig {
            channels: fields.size_or("num_channels", 3)?,
            patch: fields.side_or("patch_size", 4)?,
            widths,
            depths,
            activation: fields.activation("hidden_act", Activation::Gelu)?,
            eps: fields.number_or("layer_norm_eps", 1e-12)?,
            layer_scale: fields.number_or("layer_scale_init_value", 1e-6)?.max(0.0),
            labels: labels(fields).at_caller()?,
            fields: fields.fields().clone(),
        };
        fields.finish()?;
        if config.patch == 0 {
            return Err(fields.wrong("patch_size", "is 0")).at_caller();
        }
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        fields.remove("num_hidden_layers");
        for (name, value) in [
            ("model_type", json!("convnext")),
            ("architectures", json!(["ConvNextForImageClassification"])),
            ("num_channels", self.channels.into()),
            ("patch_size", self.patch.into()),
            ("num_stages", self.depths.len().into()),
            ("hidden_sizes", json!(self.widths)),
            ("depths", json!(self.depths)),
            ("hidden_act", json!(activation_name(self.activation))),
            ("layer_norm_eps", json!(self.eps)),
            ("layer_scale_init_value", json!(self.layer_scale)),
        ] {
            fields.insert(name.into(), value);
        }
        with_labels(fields, self.labels)
    }

    /// Checks that the fields to be written describe this very model.
    fn check(&self) -> Result<()> {
        check_sizes("convnext", &[("patch", self.patch), ("channels", self.channels), ("labels", self.labels)])?;
        let again = ConvNextConfig { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        same("convnext", &again, self)
    }
}

/// A classifier of images (Liu et al. 2022): `[B, K, H, W]` to logits `[B, N]`.
#[derive(Debug, Module)]
pub struct ConvNext<R: Runtime> {
    /// The projection of patches.
    pub patches: Conv2d<R>,
    /// The norm of patches.
    pub patch_norm: LayerNorm<R>,
    /// The layers of each stage.
    pub stages: Vec<ConvNextStage<R>>,
    /// The norm of the mean over all places.
    pub norm: LayerNorm<R>,
    /// The projection to logits of classes.
    pub classifier: Linear<R>,
    #[module(skip)]
    config: ConvNextConfig,
}

/// A stage of a [`ConvNext`].
#[derive(Debug, Module)]
pub struct ConvNextStage<R: Runtime> {
    /// The norm before height and width are halved; the first stage has none.
    pub halving_norm: Option<LayerNorm<R>>,
    /// The convolution that halves height and width.
    pub halving: Option<Conv2d<R>>,
    /// The layers, in order.
    pub layers: Vec<ConvNextLayer<R>>,
}

/// A layer of `x: [B, C, H, W]`: `x + scale · linear2(act(linear1(norm(conv(x)))))`.
#[derive(Debug, Module)]
pub struct ConvNextLayer<R: Runtime> {
    /// The convolution of each channel by itself, 7 wide.
    pub conv: Conv2d<R>,
    /// The norm of the channels of each place.
    pub norm: LayerNorm<R>,
    /// The linear layer to `4C` channels.
    pub linear1: Linear<R>,
    /// The linear layer back.
    pub linear2: Linear<R>,
    /// The scale of each channel of the output, `[C]`.
    pub scale: Option<Param<R>>,
    #[module(skip)]
    activation: Activation,
}

impl<R: Runtime> ConvNextLayer<R> {
    fn new(init: &Init<R>, config: &ConvNextConfig, width: usize) -> Result<Self> {
        let options = ConvOptions { padding: [3; 2], groups: width, ..Default::default() };
        let scale = || init.param([width], Initializer::Constant(config.layer_scale));
        Ok(ConvNextLayer {
            conv: Conv2d::new(init, width, width, [7; 2], options)?,
            norm: norm(init, width)?,
            linear1: Linear::new(init, width, 4 * width)?,
            linear2: Linear::new(init, 4 * width, width)?,
            scale: (config.layer_scale > 0.0).then(scale).transpose()?,
            activation: config.activation,
        })
    }
}

impl<R: Runtime> Forward<R> for ConvNextLayer<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let y = self.conv.forward(x).within("conv")?.permute(&[0, 2, 3, 1])?;
        let y = self.linear1.forward(&self.norm.forward(&y).within("norm")?).within("linear1")?;
        let y = self.linear2.forward(&self.activation.apply(&y)?).within("linear2")?;
        let y = self.scale.as_ref().map_or(Ok(y.clone()), |scale| y.mul(&scale.var()))?;
        x.add(&y.permute(&[0, 3, 1, 2])?)
    }
}

impl<R: Runtime> ConvNextStage<R> {
    fn new(init: &Init<R>, config: &ConvNextConfig, stage: usize) -> Result<Self> {
        let (width, depth) = (config.widths[stage], config.depths[stage]);
        let before = stage.checked_sub(1).map(|before| config.widths[before]);
        let options = ConvOptions { stride: [2; 2], ..Default::default() };
        let halving = |before: usize| Conv2d::new(init, before, width, [2; 2], options);
        Ok(ConvNextStage {
            halving_norm: before.map(|before| norm(init, before)).transpose()?,
            halving: before.map(halving).transpose()?,
            layers: (0..depth).map(|_| ConvNextLayer::new(init, config, width)).collect::<Result<_>>()?,
        })
    }
}

impl<R: Runtime> Forward<R> for ConvNextStage<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let mut x = match (&self.halving_norm, &self.halving) {
            (Some(norm), Some(conv)) => {
                conv.forward(&of_channels(norm, x).within("halving_norm")?).within("halving")?
            }
            _ => x.clone(),
        };
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x).within(format_args!("layers.{i}"))?;
        }
        Ok(x)
    }
}

fn norm<R: Runtime>(init: &Init<R>, width: usize) -> Result<LayerNorm<R>> {
    Ok(LayerNorm { eps: EPS, ..LayerNorm::new(init, width)? })
}

/// Normalizes the channels of each place of `x: [B, C, H, W]`.
fn of_channels<R: Runtime>(norm: &LayerNorm<R>, x: &Var<R>) -> Result<Var<R>> {
    norm.forward(&x.permute(&[0, 2, 3, 1])?)?.permute(&[0, 3, 1, 2])
}

impl<R: Runtime> ConvNext<R> {
    /// Builds a model of these sizes. Weights are normal with standard deviation 0.02 and biases 0, unless `init` sets
    /// other initializers.
    ///
    /// # Errors
    /// Fails if sizes do not fit each other, or transformers has no such model.
    #[track_caller]
    pub fn new(init: &Init<R>, config: ConvNextConfig) -> Result<Self> {
        config.check().at_caller()?;
        let init = &init.clone().weights(Initializer::Normal { mean: 0.0, std: 0.02 }).biases(Initializer::Zeros);
        let (first, last) = (config.widths[0], config.widths[config.widths.len() - 1]);
        let options = ConvOptions { stride: [config.patch; 2], ..Default::default() };
        let stages = (0..config.widths.len()).map(|stage| ConvNextStage::new(init, &config, stage));
        let model = ConvNext {
            patches: Conv2d::new(init, config.channels, first, [config.patch; 2], options)?,
            patch_norm: norm(init, first)?,
            stages: stages.collect::<Result<_>>().at_caller()?,
            norm: LayerNorm { eps: config.eps, ..LayerNorm::new(init, last)? },
            classifier: Linear::new(init, last, config.labels)?,
            config,
        };
        // A first pass gives parameters their names, which errors then have.
        model.named_parameters();
        Ok(model)
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &ConvNextConfig {
        &self.config
    }

    /// Computes the last stage's output `[B, C, h, w]` of images `[B, K, H, W]`.
    ///
    /// # Errors
    /// Fails if the image has another number of channels, or is too small.
    #[track_caller]
    pub fn states(&self, pixels: &Var<R>) -> Result<Var<R>> {
        let (shape, channels) = (pixels.spec().shape, self.config.channels);
        if shape.rank() != 4 || shape[1] != channels {
            let why = format!("images must be [B, {channels}, H, W]");
            return Err(Error::shape("convnext", &[shape], why)).at_caller();
        }
        let x = self.patches.forward(pixels).within("patches").at_caller()?;
        let mut x = of_channels(&self.patch_norm, &x).within("patch_norm").at_caller()?;
        for (i, stage) in self.stages.iter().enumerate() {
            x = stage.forward(&x).within(format_args!("stages.{i}")).at_caller()?;
        }
        Ok(x)
    }
}

impl<R: Runtime> Forward<R> for ConvNext<R> {
    fn forward(&self, pixels: &Var<R>) -> Result<Var<R>> {
        let pooled = self.norm.forward(&self.states(pixels)?.mean(&[-2, -1])?).within("norm")?;
        self.classifier.forward(&pooled).within("classifier")
    }
}

impl<R: Runtime> Pretrained<R> for ConvNext<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        ConvNext::new(init, ConvNextConfig::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        CONVNEXT
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
