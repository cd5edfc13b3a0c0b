//! CLIP: texts and images as vectors of one space.

mod config;

use autograd::Var;
use nn::{
    Conv2d, ConvOptions, Embedding, Forward, Init, Initializer, LayerNorm, Linear, Module, ModuleExt, Param,
    parallel::{CutLayer, Cuts},
};
use numcore::{
    DType, Error, Result, Runtime, Within,
    ops::{Apply, DistanceOps, IndexOps, MatmulOps, PointwiseOps, SortOps, ViewOps, cat},
};
use serde_json::{Map, Value};

pub use config::{ClipConfig, ClipTower};

use crate::{
    config::ConfigFields,
    convert::{CLIP, ConversionTable},
    pretrained::Pretrained,
    seq2seq::{LayerStack, StackInputs},
};

/// A model of texts and images (Radford et al. 2021): each is a vector of `P` numbers, and a text and its image are
/// near.
///
/// There is no dropout: its fields in `config.json` are kept and written back.
#[derive(Debug, Module)]
pub struct Clip<R: Runtime> {
    /// The tower of texts.
    pub text: ClipText<R>,
    /// The tower of images.
    pub image: ClipImage<R>,
    /// The projection of texts, `[P, C]`.
    pub text_projection: Linear<R>,
    /// The projection of images, `[P, C]`.
    pub image_projection: Linear<R>,
    /// The logarithm of the factor of cosines, a scalar.
    pub logit_scale: Param<R>,
    #[module(skip)]
    config: ClipConfig,
}

/// The tower of texts: tokens see no later ones.
#[derive(Debug, Module)]
pub struct ClipText<R: Runtime> {
    /// The token embedding, `[V, C]`.
    pub embed_tokens: Embedding<R>,
    /// The position embedding, `[T, C]`.
    pub embed_positions: Embedding<R>,
    /// The layers and the last norm.
    #[module(flatten)]
    pub stack: LayerStack<R>,
}

/// The tower of images.
#[derive(Debug, Module)]
pub struct ClipImage<R: Runtime> {
    /// The class token before the patches, `[C]`, whose state stands for the image.
    pub cls_token: Param<R>,
    /// The projection of patches.
    pub patches: Conv2d<R>,
    /// The position embedding, `[1 + patches, C]`.
    pub embed_positions: Embedding<R>,
    /// The norm before the layers.
    pub first_norm: LayerNorm<R>,
    /// The layers and the last norm.
    #[module(flatten)]
    pub stack: LayerStack<R>,
}

impl<R: Runtime> Clip<R> {
    /// Builds a model of these sizes. Weights are normal with standard deviation 0.02 and biases 0, unless `init` sets
    /// other initializers.
    ///
    /// # Errors
    /// Fails if sizes do not fit each other, or transformers has no such model.
    #[track_caller]
    pub fn new(init: &Init<R>, config: ClipConfig) -> Result<Self> {
        config.check().at_caller()?;
        let small = Initializer::Normal { mean: 0.0, std: 0.02 };
        let init = &init.clone().weights(small).biases(Initializer::Zeros);
        let table = |rows, width| Embedding::new(init, rows, width).map(|table| table.with_cuts(Cuts::None));
        let linear = |inputs| Linear::new(init, inputs, config.projection).map(Linear::without_bias);
        let (text, image, per_side) = (config.text, config.image, config.size / config.patch);
        let options = ConvOptions { stride: [config.patch; 2], ..Default::default() };
        let model = Clip {
            text: ClipText {
                embed_tokens: table(config.vocab, text.width)?,
                embed_positions: table(config.context, text.width)?,
                stack: LayerStack::new(init, text.stack(true)).at_caller()?,
            },
            image: ClipImage {
                cls_token: init.param([image.width], small).at_caller()?,
                patches: Conv2d::new(init, config.channels, image.width, [config.patch; 2], options)?.without_bias(),
                embed_positions: table(1 + per_side * per_side, image.width)?,
                first_norm: LayerNorm { eps: image.eps, ..LayerNorm::new(init, image.width)? },
                stack: LayerStack::new(init, image.stack(false)).at_caller()?,
            },
            text_projection: linear(text.width)?,
            image_projection: linear(image.width)?,
            // As in transformers, 1 / 0.07.
            logit_scale: init.param([], Initializer::Constant(2.6592)).at_caller()?,
            config,
        };
        // A first pass gives parameters their names, which errors then have.
        model.named_parameters();
        Ok(model)
    }

    /// The sizes and options of this model.
    pub fn config(&self) -> &ClipConfig {
        &self.config
    }

    /// Computes the vectors `[B, P]` of texts, tokens `[B, T]` (`i64`), of length 1. What follows the end of a text
    /// changes nothing, so texts are padded on the right.
    ///
    /// # Errors
    /// Fails if shapes do not fit, or texts are longer than the context.
    #[track_caller]
    pub fn embed_texts(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let shape = tokens.spec().shape;
        let &[b, t] = &shape[..] else {
            return Err(Error::shape("clip", &[shape], "tokens must be [B, T]")).at_caller();
        };
        if t == 0 || t > self.config.context {
            let why = format!("{t} tokens: give 1 to {}", self.config.context);
            return Err(Error::shape("clip", &[shape], why)).at_caller();
        }
        let x = self.text.embed_tokens.forward(tokens).within("text.embed_tokens").at_caller()?;
        let x = x.add(&self.text.embed_positions.weight.var().narrow(0, 0, t)?)?;
        let states = self.text.stack.forward_with(&x, StackInputs::default()).within("text").at_caller()?;
        // The first place of the token that ends a text, or of the largest token.
        let ends = match self.config.end {
            Some(end) => tokens.eq(end as f64)?.to_dtype(DType::F32)?,
            None => tokens.to_dtype(DType::F32)?,
        };
        let ends = ends.topk(1, -1)?.1.reshape([b, 1, 1])?.broadcast_to([b, 1, self.config.text.width])?;
        let pooled = states.gather(1, &ends)?.squeeze(1)?;
        self.text_projection.forward(&pooled).within("text_projection").at_caller()?.normalize(-1)
    }

    /// Computes the vectors `[B, P]` of images `[B, K, H, W]`, of length 1.
    ///
    /// # Errors
    /// Fails if the image has another size than the model's.
    #[track_caller]
    pub fn embed_images(&self, pixels: &Var<R>) -> Result<Var<R>> {
        let (shape, ClipConfig { channels, size, image: tower, .. }) = (pixels.spec().shape, &self.config);
        if shape.rank() != 4 || shape[1..] != [*channels, *size, *size] {
            let why = format!("images must be [B, {channels}, {size}, {size}]");
            return Err(Error::shape("clip", &[shape], why)).at_caller();
        }
        let patches = self.image.patches.forward(pixels).within("image.patches").at_caller()?;
        let patches = patches.flatten(2, 3)?.transpose(1, 2)?;
        let first = self.image.cls_token.var().broadcast_to([shape[0], 1, tower.width])?;
        let x = cat(&[&first, &patches], 1)?.add(&self.image.embed_positions.weight.var())?;
        let x = self.image.first_norm.forward(&x).within("image.first_norm").at_caller()?;
        let states = self.image.stack.forward_with(&x, StackInputs::default()).within("image").at_caller()?;
        self.image_projection.forward(&states.select(1, 0)?).within("image_projection").at_caller()?.normalize(-1)
    }

    /// Computes the cosines `[B, N]` of `B` texts and `N` images, times the factor that the model learned: logits of
    /// the images of each text. Their transpose has those of the texts of each image.
    ///
    /// # Errors
    /// Fails if [`embed_texts`](Clip::embed_texts) or [`embed_images`](Clip::embed_images) would fail.
    #[track_caller]
    pub fn logits(&self, tokens: &Var<R>, pixels: &Var<R>) -> Result<Var<R>> {
        let (texts, images) = (self.embed_texts(tokens)?, self.embed_images(pixels)?);
        texts.matmul(&images.t()?)?.mul(&self.logit_scale.var().exp()?)
    }
}

impl<R: Runtime> Pretrained<R> for Clip<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        Clip::new(init, ClipConfig::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        CLIP
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
