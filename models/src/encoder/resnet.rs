//! ResNet: convolutions with batch norm, for classes of images.

use autograd::Var;
use nn::{
    Activation, AdaptiveAvgPool2d, BatchNorm2d, Conv2d, ConvOptions, Fan, Forward, Init, Initializer, Linear,
    MaxPool2d, Module, ModuleExt, Nonlinearity,
};
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, PointwiseOps, ViewOps},
};
use serde_json::{Map, Value, json};

use super::bert_config::{expect_type, labels, same, with_labels, written};
use crate::{
    config::{ConfigFields, activation_name, check_sizes},
    convert::{ConversionTable, RESNET},
    pretrained::Pretrained,
};

/// The sizes and options of a [`ResNet`], as `config.json` has them.
#[derive(Clone, Debug, PartialEq)]
pub struct ResNetConfig {
    /// The number of channels of an image, `K`.
    pub channels: usize,
    /// The number of channels after the first convolution.
    pub stem: usize,
    /// The number of channels of each stage.
    pub widths: Vec<usize>,
    /// The number of layers of each stage.
    pub depths: Vec<usize>,
    /// True for layers of three convolutions, whose middle one has a quarter of the channels; false for two.
    pub bottleneck: bool,
    /// The activation of the first convolution, and of each layer's output. Others are ReLU.
    pub activation: Activation,
    /// True if the first stage halves height and width, as the others do.
    pub first_halves: bool,
    /// True if the first convolution of a bottleneck halves them in place of the second.
    pub halves_before: bool,
    /// The number of classes, `N`.
    pub labels: usize,
    /// The fields of the file, all of which are written back.
    pub fields: Map<String, Value>,
}

impl ResNetConfig {
    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// Fails if a field is missing, malformed, or unknown and not known to be harmless.
    #[track_caller]
    pub fn read(fields: &ConfigFields) -> Result<Self> {
        expect_type(fields, "resnet").at_caller()?;
        let bottleneck = match fields.text_or("layer_type", "bottleneck").at_caller()? {
            "bottleneck" => true,
            "basic" => false,
            other => {
                let why = format_args!("is `{other}`; basic and bottleneck are known");
                return Err(fields.wrong("layer_type", why)).at_caller();
            }
        };
        let [widths, depths] = stages(fields, [256, 512, 1024, 2048], [3, 4, 6, 3]).at_caller()?;
        let config = ResNetConfig {
            channels: fields.size_or("num_channels", 3)?,
            stem: fields.size_or("embedding_size", 64)?,
            widths,
            depths,
            bottleneck,
            activation: fields.activation("hidden_act", Activation::Relu)?,
            first_halves: fields.flag_or("downsample_in_first_stage", false)?,
            halves_before: fields.flag_or("downsample_in_bottleneck", false)?,
            labels: labels(fields).at_caller()?,
            fields: fields.fields().clone(),
        };
        fields.finish()?;
        Ok(config)
    }

    /// The fields of a `config.json` that transformers loads.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        for (name, value) in [
            ("model_type", json!("resnet")),
            ("architectures", json!(["ResNetForImageClassification"])),
            ("num_channels", self.channels.into()),
            ("embedding_size", self.stem.into()),
            ("hidden_sizes", json!(self.widths)),
            ("depths", json!(self.depths)),
            ("layer_type", json!(if self.bottleneck { "bottleneck" } else { "basic" })),
            ("hidden_act", json!(activation_name(self.activation))),
            ("downsample_in_first_stage", self.first_halves.into()),
            ("downsample_in_bottleneck", self.halves_before.into()),
        ] {
            fields.insert(name.into(), value);
        }
        with_labels(fields, self.labels)
    }

    /// Checks that the fields to be written describe this very model.
    fn check(&self) -> Result<()> {
        check_sizes("resnet", &[("stem", self.stem), ("channels", self.channels), ("labels", self.labels)])?;
        let again = ResNetConfig { fields: self.fields.clone(), ..Self::read(&written(self.to_json()))? };
        same("resnet", &again, self)
    }
}

/// The channels and the layers of each stage of an image model, by the names that transformers has for them.
pub(super) fn stages<const N: usize>(
    fields: &ConfigFields,
    widths: [usize; N],
    depths: [usize; N],
) -> Result<[Vec<usize>; 2]> {
    // Fields of backbones, which name the stages whose states are given out.
    fields.list("stage_names")?;
    fields.list("out_features")?;
    fields.leave(&["out_indices"]);
    let widths = fields.sizes("hidden_sizes")?.unwrap_or(widths.into());
    let depths = fields.sizes("depths")?.unwrap_or(depths.into());
    if widths.len() != depths.len() || widths.is_empty() || depths.contains(&0) || depths.iter().any(|&d| d > 1000) {
        let why = format_args!("are {depths:?} for stages of {widths:?} channels: each stage needs 1 to 1000 layers");
        return Err(fields.wrong("depths", why));
    }
    Ok([widths, depths])
}

/// A classifier of images (He et al. 2015): `[B, K, H, W]` to logits `[B, N]`. Batch norms have the statistics of the
/// batch in training; call [`eval`](ModuleExt::eval) for those of the files.
#[derive(Debug, Module)]
pub struct ResNet<R: Runtime> {
    /// The first convolution, before a pooling.
    pub stem: NormedConv<R>,
    /// The layers of each stage.
    pub stages: Vec<ResNetStage<R>>,
    /// The projection of the mean over all places to logits of classes.
    pub classifier: Linear<R>,
    #[module(skip)]
    config: ResNetConfig,
}

/// A stage of a [`ResNet`].
#[derive(Debug, Module)]
pub struct ResNetStage<R: Runtime> {
    /// The layers, in order.
    pub layers: Vec<ResNetLayer<R>>,
}

/// A layer of `x: [B, C, H, W]`: the activation of its convolutions' output and of `x`.
#[derive(Debug, Module)]
pub struct ResNetLayer<R: Runtime> {
    /// The convolution of `x` where the output has another size.
    pub shortcut: Option<NormedConv<R>>,
    /// The convolutions, with ReLU between them.
    pub convs: Vec<NormedConv<R>>,
    #[module(skip)]
    activation: Activation,
}

/// A convolution without a bias, and its batch norm.
#[derive(Debug, Module)]
pub struct NormedConv<R: Runtime> {
    /// The convolution.
    pub conv: Conv2d<R>,
    /// The norm of its output.
    pub norm: BatchNorm2d<R>,
}

impl<R: Runtime> NormedConv<R> {
    fn new(init: &Init<R>, inputs: usize, outputs: usize, kernel: usize, stride: usize) -> Result<Self> {
        let options = ConvOptions { stride: [stride; 2], padding: [kernel / 2; 2], ..Default::default() };
        let conv = Conv2d::new(init, inputs, outputs, [kernel; 2], options)?.without_bias();
        Ok(NormedConv { conv, norm: BatchNorm2d::new(init, outputs)? })
    }
}

impl<R: Runtime> Forward<R> for NormedConv<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        self.norm.forward(&self.conv.forward(x).within("conv")?).within("norm")
    }
}

impl<R: Runtime> ResNetLayer<R> {
    fn new(init: &Init<R>, config: &ResNetConfig, inputs: usize, outputs: usize, stride: usize) -> Result<Self> {
        let conv = |inputs, outputs, kernel, stride| NormedConv::new(init, inputs, outputs, kernel, stride);
        let changes = inputs != outputs || stride != 1;
        let middle = outputs / 4;
        let (first, second) = if config.halves_before { (stride, 1) } else { (1, stride) };
        Ok(ResNetLayer {
            shortcut: changes.then(|| conv(inputs, outputs, 1, stride)).transpose()?,
            convs: match config.bottleneck {
                false => vec![conv(inputs, outputs, 3, stride)?, conv(outputs, outputs, 3, 1)?],
                true => vec![
                    conv(inputs, middle, 1, first)?,
                    conv(middle, middle, 3, second)?,
                    conv(middle, outputs, 1, 1)?,
                ],
            },
            activation: config.activation,
        })
    }
}

impl<R: Runtime> Forward<R> for ResNetLayer<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let mut y = x.clone();
        for (i, conv) in self.convs.iter().enumerate() {
            y = conv.forward(&y).within(format_args!("convs.{i}"))?;
            y = if i + 1 < self.convs.len() { y.relu()? } else { y };
        }
        let x = self.shortcut.as_ref().map_or(Ok(x.clone()), |shortcut| shortcut.forward(x).within("shortcut"))?;
        self.activation.apply(&y.add(&x)?)
    }
}

impl<R: Runtime> ResNet<R> {
    /// Builds a model of these sizes. Weights of convolutions are drawn by Kaiming's initialization over the fan-out,
    /// unless `init` sets another initializer.
    ///
    /// # Errors
    /// Fails if sizes do not fit each other, or transformers has no such model.
    #[track_caller]
    pub fn new(init: &Init<R>, config: ResNetConfig) -> Result<Self> {
        config.check().at_caller()?;
        let drawn = Initializer::KaimingNormal { fan: Fan::Out, gain: Nonlinearity::Relu.gain() };
        let (convs, mut inputs, mut stages) = (init.clone().weights(drawn), config.stem, Vec::new());
        for (i, (&width, &depth)) in config.widths.iter().zip(&config.depths).enumerate() {
            let halves = i > 0 || config.first_halves;
            let layer = |k: usize| match k {
                0 => ResNetLayer::new(&convs, &config, inputs, width, if halves { 2 } else { 1 }),
                _ => ResNetLayer::new(&convs, &config, width, width, 1),
            };
            stages.push(ResNetStage { layers: (0..depth).map(layer).collect::<Result<_>>().at_caller()? });
            inputs = width;
        }
        let model = ResNet {
            stem: NormedConv::new(&convs, config.channels, config.stem, 7, 2).at_caller()?,
            stages,
            classifier: Linear::new(init, inputs, config.labels)?,
            config,
        };
        // A first pass gives parameters their names, which errors then have.
        model.named_parameters();
        Ok(model)
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &ResNetConfig {
        &self.config
    }

    /// Computes the last stage's output `[B, C, h, w]` of images `[B, K, H, W]`.
    ///
    /// # Errors
    /// Fails if the image has another number of channels.
    #[track_caller]
    pub fn states(&self, pixels: &Var<R>) -> Result<Var<R>> {
        let (shape, channels) = (pixels.spec().shape, self.config.channels);
        if shape.rank() != 4 || shape[1] != channels {
            let why = format!("images must be [B, {channels}, H, W]");
            return Err(Error::shape("resnet", &[shape], why)).at_caller();
        }
        let x = self.config.activation.apply(&self.stem.forward(pixels).within("stem").at_caller()?)?;
        let mut x = MaxPool2d::new(3).with_stride([2; 2]).with_padding([1; 2]).forward(&x)?;
        for (i, stage) in self.stages.iter().enumerate() {
            for (k, layer) in stage.layers.iter().enumerate() {
                x = layer.forward(&x).within(format_args!("stages.{i}.layers.{k}")).at_caller()?;
            }
        }
        Ok(x)
    }
}

impl<R: Runtime> Forward<R> for ResNet<R> {
    fn forward(&self, pixels: &Var<R>) -> Result<Var<R>> {
        let pooled = AdaptiveAvgPool2d { size: [1; 2] }.forward(&self.states(pixels)?)?.flatten(1, 3)?;
        self.classifier.forward(&pooled).within("classifier")
    }
}

impl<R: Runtime> Pretrained<R> for ResNet<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        ResNet::new(init, ResNetConfig::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        RESNET
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
