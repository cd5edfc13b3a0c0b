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

pub use config::{ClipConfig, ClipImageConfig, ClipTextConfig, ClipTower};

use crate::{
    config::ConfigFields,
    convert::{CLIP, ConversionTable},
    pretrained::Pretrained,
    seq2seq::{LayerStack, StackInputs},
};

/// A model of texts and images (Radford et al. 2021): each is a vector of `P` numbers, and a text and its image are
/// near. A folder of one tower is a model without the other.
///
/// There is no dropout: its fields in `config.json` are kept and written back.
#[derive(Debug, Module)]
pub struct Clip<R: Runtime> {
    /// The tower of texts.
    pub text: Option<ClipText<R>>,
    /// The tower of images.
    pub image: Option<ClipImage<R>>,
    /// The projection of texts, `[P, C]`.
    pub text_projection: Option<Linear<R>>,
    /// The projection of images, `[P, C]`.
    pub image_projection: Option<Linear<R>>,
    /// The logarithm of the factor of cosines, a scalar, of a model with both towers.
    pub logit_scale: Option<Param<R>>,
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
    #[module(skip)]
    config: ClipTextConfig,
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
    #[module(skip)]
    config: ClipImageConfig,
}

impl<R: Runtime> ClipText<R> {
    fn new(init: &Init<R>, config: ClipTextConfig) -> Result<Self> {
        let table = |rows| table(init, rows, config.tower.width);
        Ok(ClipText {
            embed_tokens: table(config.vocab)?,
            embed_positions: table(config.context)?,
            stack: LayerStack::new(init, config.tower.stack(true))?,
            config,
        })
    }

    /// Computes the normalized states `[B, T, C]` of tokens `[B, T]` (`i64`), and the state `[B, C]` that stands for
    /// each text. Tokens after the end of a text change none of them.
    ///
    /// # Errors
    /// Fails if shapes do not fit, or texts are longer than the context.
    #[track_caller]
    pub fn states(&self, tokens: &Var<R>) -> Result<[Var<R>; 2]> {
        let shape = tokens.spec().shape;
        let &[b, t] = &shape[..] else {
            return Err(Error::shape("clip", &[shape], "tokens must be [B, T]")).at_caller();
        };
        if t == 0 || t > self.config.context {
            let why = format!("{t} tokens: give 1 to {}", self.config.context);
            return Err(Error::shape("clip", &[shape], why)).at_caller();
        }
        let x = self.embed_tokens.forward(tokens).within("embed_tokens").at_caller()?;
        let x = x.add(&self.embed_positions.weight.var().narrow(0, 0, t)?)?;
        let states = self.stack.forward_with(&x, StackInputs::default()).at_caller()?;
        // The first place of the token that ends a text, or of the largest token.
        let ends = match self.config.end {
            Some(end) => tokens.eq(end as f64)?.to_dtype(DType::F32)?,
            None => tokens.to_dtype(DType::F32)?,
        };
        let ends = ends.topk(1, -1)?.1.reshape([b, 1, 1])?.broadcast_to([b, 1, self.config.tower.width])?;
        let pooled = states.gather(1, &ends)?.squeeze(1)?;
        Ok([states, pooled])
    }
}

impl<R: Runtime> ClipImage<R> {
    fn new(init: &Init<R>, config: ClipImageConfig) -> Result<Self> {
        let ClipImageConfig { tower, channels, size, patch } = config;
        let (width, per_side) = (tower.width, size / patch.max(1));
        let options = ConvOptions { stride: [patch; 2], ..Default::default() };
        Ok(ClipImage {
            cls_token: init.param([width], SMALL)?,
            patches: Conv2d::new(init, channels, width, [patch; 2], options)?.without_bias(),
            embed_positions: table(init, 1 + per_side * per_side, width)?,
            first_norm: LayerNorm { eps: tower.eps, ..LayerNorm::new(init, width)? },
            stack: LayerStack::new(init, tower.stack(false))?,
            config,
        })
    }

    /// Computes the states `[B, 1 + patches, C]` of images `[B, K, H, W]`, and the normalized state `[B, C]` that
    /// stands for each image.
    ///
    /// # Errors
    /// Fails if the image has another size than the model's.
    #[track_caller]
    pub fn states(&self, pixels: &Var<R>) -> Result<[Var<R>; 2]> {
        let (shape, ClipImageConfig { tower, channels, size, .. }) = (pixels.spec().shape, self.config);
        if shape.rank() != 4 || shape[1..] != [channels, size, size] {
            let why = format!("images must be [B, {channels}, {size}, {size}]");
            return Err(Error::shape("clip", &[shape], why)).at_caller();
        }
        let patches = self.patches.forward(pixels).within("patches").at_caller()?;
        let patches = patches.flatten(2, 3)?.transpose(1, 2)?;
        let first = self.cls_token.var().broadcast_to([shape[0], 1, tower.width])?;
        let x = cat(&[&first, &patches], 1)?.add(&self.embed_positions.weight.var())?;
        let x = self.first_norm.forward(&x).within("first_norm").at_caller()?;
        let states = self.stack.layers_with(&x, StackInputs::default()).at_caller()?;
        let pooled = self.stack.norm.forward(&states.select(1, 0)?).within("norm").at_caller()?;
        Ok([states, pooled])
    }
}

/// The first values of weights.
const SMALL: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };

fn table<R: Runtime>(init: &Init<R>, rows: usize, width: usize) -> Result<Embedding<R>> {
    Ok(Embedding::new(init, rows, width)?.with_cuts(Cuts::None))
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
        let init = &init.clone().weights(SMALL).biases(Initializer::Zeros);
        let linear = |width: Option<usize>| {
            let sizes = width.zip(config.projection);
            sizes.map(|(width, space)| Linear::new(init, width, space).map(Linear::without_bias)).transpose()
        };
        let is_both = config.text.is_some() && config.image.is_some();
        let model = Clip {
            text: config.text.map(|text| ClipText::new(init, text)).transpose().at_caller()?,
            image: config.image.map(|image| ClipImage::new(init, image)).transpose().at_caller()?,
            text_projection: linear(config.text.map(|text| text.tower.width))?,
            image_projection: linear(config.image.map(|image| image.tower.width))?,
            // As in transformers, 1 / 0.07.
            logit_scale: is_both.then(|| init.param([], Initializer::Constant(2.6592))).transpose().at_caller()?,
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
    /// Fails if shapes do not fit, texts are longer than the context, or the model has no tower of texts with a
    /// projection.
    #[track_caller]
    pub fn embed_texts(&self, tokens: &Var<R>) -> Result<Var<R>> {
        let (Some(text), Some(projection)) = (&self.text, &self.text_projection) else {
            return Err(lacks("tower of texts")).at_caller();
        };
        let [_, pooled] = text.states(tokens).within("text").at_caller()?;
        projection.forward(&pooled).within("text_projection").at_caller()?.normalize(-1)
    }

    /// Computes the vectors `[B, P]` of images `[B, K, H, W]`, of length 1.
    ///
    /// # Errors
    /// Fails if the image has another size than the model's, or the model has no tower of images with a projection.
    #[track_caller]
    pub fn embed_images(&self, pixels: &Var<R>) -> Result<Var<R>> {
        let (Some(image), Some(projection)) = (&self.image, &self.image_projection) else {
            return Err(lacks("tower of images")).at_caller();
        };
        let [_, pooled] = image.states(pixels).within("image").at_caller()?;
        projection.forward(&pooled).within("image_projection").at_caller()?.normalize(-1)
    }

    /// Computes the cosines `[B, N]` of `B` texts and `N` images, times the factor that the model learned: logits of
    /// the images of each text. Their transpose has those of the texts of each image.
    ///
    /// # Errors
    /// Fails if [`embed_texts`](Clip::embed_texts) or [`embed_images`](Clip::embed_images) would fail.
    #[track_caller]
    pub fn logits(&self, tokens: &Var<R>, pixels: &Var<R>) -> Result<Var<R>> {
        let (texts, images) = (self.embed_texts(tokens)?, self.embed_images(pixels)?);
        let scale = self.logit_scale.as_ref().ok_or_else(|| lacks("factor of cosines")).at_caller()?;
        texts.matmul(&images.t()?)?.mul(&scale.var().exp()?)
    }
}

fn lacks(part: &str) -> Error {
    let why = format!("there is no {part} with a projection: a lone tower has `states` alone");
    Error::state("clip", why)
}

impl<R: Runtime> Pretrained<R> for Clip<R> {
    fn from_fields(init: &Init<R>, fields: &ConfigFields) -> Result<Self> {
        Clip::new(init, ClipConfig::read(fields)?)
    }

    fn table(&self) -> ConversionTable {
        // Files of a lone tower may leave its name out.
        let prefix = match (&self.text, &self.image) {
            (Some(_), None) => "text_model.",
            (None, Some(_)) => "vision_model.",
            _ => "",
        };
        ConversionTable { prefix, ..CLIP }
    }

    fn fields(&self) -> Map<String, Value> {
        self.config.to_json()
    }
}
