//! Norms over the statistics of each sample.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    fused::NnOps,
    ops::{Apply, PointwiseOps},
};

use super::{optional, without_bias};
use crate::{Forward, Init, Initializer, Module, Param, parallel::ContextSlot};

/// Layer norm (Ba et al. 2016) over the last axis of `x: [.., C]`.
#[derive(Debug, Module)]
pub struct LayerNorm<R: Runtime> {
    /// The scale of each channel, `[C]`.
    pub weight: Param<R>,
    /// The shift of each channel, `[C]`.
    pub bias: Option<Param<R>>,
    /// The constant added to the variance; 1e-5 unless set.
    pub eps: f64,
}

/// RMS norm (Zhang & Sennrich 2019) over the last axis of `x: [.., C]`.
#[derive(Debug, Module)]
pub struct RmsNorm<R: Runtime> {
    /// The scale of each channel, `[C]`.
    pub weight: Param<R>,
    /// The constant added to the mean square; the machine epsilon of `x`'s dtype unless set.
    pub eps: Option<f64>,
    /// The number added to the weight; 0 unless set. Gemma's is 1.
    pub offset: f64,
}

/// Group norm (Wu & He 2018) of `x: [N, C, ..]`.
#[derive(Debug, Module)]
pub struct GroupNorm<R: Runtime> {
    /// The scale of each channel, `[C]`.
    pub weight: Param<R>,
    /// The shift of each channel, `[C]`.
    pub bias: Option<Param<R>>,
    /// The constant added to the variance; 1e-5 unless set.
    pub eps: f64,
    groups: usize,
    context: ContextSlot<R>,
}

/// Instance norm (Ulyanov et al. 2016) of `x: [N, C, ..]`, over the axes after the channels, in training and in use.
#[doc(alias("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"))]
#[derive(Debug, Module)]
pub struct InstanceNorm<R: Runtime> {
    /// The scale of each channel, `[C]`, if the layer has one.
    pub weight: Option<Param<R>>,
    /// The shift of each channel, `[C]`, if the layer has one.
    pub bias: Option<Param<R>>,
    /// The constant added to the variance; 1e-5 unless set.
    pub eps: f64,
    channels: usize,
    context: ContextSlot<R>,
}

without_bias!(LayerNorm, GroupNorm, InstanceNorm);

impl<R: Runtime> LayerNorm<R> {
    /// A norm with weight 1 and bias 0.
    #[track_caller]
    pub fn new(init: &Init<R>, width: usize) -> Result<Self> {
        let (weight, bias) = (init.param([width], Initializer::Ones)?, Some(init.param([width], Initializer::Zeros)?));
        Ok(LayerNorm { weight, bias, eps: 1e-5 })
    }

    /// Computes the forward pass, [`recomputed`](autograd::recomputed) in backward by the ops that would save its
    /// result.
    #[track_caller]
    pub(super) fn recomputed(&self, x: &Var<R>) -> Result<Var<R>> {
        let (weight, bias, eps) = (self.weight.var(), optional(&self.bias), self.eps);
        let inputs: Vec<&Var<R>> = [x, &weight].into_iter().chain(&bias).collect();
        autograd::recomputed(&inputs, move |x| x[0].layer_norm(x.get(1), x.get(2), eps))
    }
}

impl<R: Runtime> RmsNorm<R> {
    /// A norm with a weight of ones.
    #[track_caller]
    pub fn new(init: &Init<R>, width: usize) -> Result<Self> {
        Self::with_offset(init, width, 0.0)
    }

    /// A norm whose weight and `offset` add up to ones.
    #[track_caller]
    pub fn with_offset(init: &Init<R>, width: usize, offset: f64) -> Result<Self> {
        Ok(RmsNorm { weight: init.param([width], Initializer::Constant(1.0 - offset))?, eps: None, offset })
    }
}

impl<R: Runtime> GroupNorm<R> {
    /// A norm with weight 1 and bias 0; `groups` divides `channels`.
    #[track_caller]
    pub fn new(init: &Init<R>, groups: usize, channels: usize) -> Result<Self> {
        if groups == 0 || !channels.is_multiple_of(groups) {
            let why = format!("{groups} groups do not divide {channels} channels");
            return Err(Error::config("group_norm", "groups", why)).at_caller();
        }
        let (weight, bias) =
            (init.param([channels], Initializer::Ones)?, Some(init.param([channels], Initializer::Zeros)?));
        Ok(GroupNorm { weight, bias, eps: 1e-5, groups, context: ContextSlot::refuses() })
    }
}

impl<R: Runtime> InstanceNorm<R> {
    /// A norm without parameters, which is PyTorch's default.
    pub fn new(channels: usize) -> Self {
        InstanceNorm { weight: None, bias: None, eps: 1e-5, channels, context: ContextSlot::refuses() }
    }

    /// A norm with weight 1 and bias 0: PyTorch's `affine=True`.
    #[track_caller]
    pub fn affine(init: &Init<R>, channels: usize) -> Result<Self> {
        let [weight, bias] = [Initializer::Ones, Initializer::Zeros].map(|how| init.param([channels], how));
        Ok(InstanceNorm { weight: Some(weight?), bias: Some(bias?), ..Self::new(channels) })
    }
}

impl<R: Runtime> Forward<R> for LayerNorm<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.layer_norm(Some(&self.weight.var()), optional(&self.bias).as_ref(), self.eps).at_caller()
    }
}

impl<R: Runtime> Forward<R> for RmsNorm<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let (weight, eps) = (self.weight.var(), self.eps.unwrap_or(x.dtype().epsilon()));
        if self.offset == 0.0 {
            return x.rms_norm(Some(&weight), eps).at_caller();
        }
        // As Gemma has it: half precision would lose digits of the weight.
        let wide = x.dtype().compute();
        let weight = weight.to_dtype(wide)?.add(self.offset)?;
        x.to_dtype(wide)?.rms_norm(Some(&weight), eps)?.to_dtype(x.dtype()).at_caller()
    }
}

impl<R: Runtime> Forward<R> for GroupNorm<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.group_norm(self.groups, Some(&self.weight.var()), optional(&self.bias).as_ref(), self.eps).at_caller()
    }
}

impl<R: Runtime> Forward<R> for InstanceNorm<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let shape = x.spec().shape;
        if shape.rank() < 3 || shape[1] != self.channels || shape.dims()[2..].iter().product::<usize>() < 2 {
            let why = format!("needs [N, {}, ..] with more than one element of each channel", self.channels);
            return Err(Error::shape("instance_norm", &[shape], why)).at_caller();
        }
        let (weight, bias) = (optional(&self.weight), optional(&self.bias));
        x.group_norm(self.channels, weight.as_ref(), bias.as_ref(), self.eps).at_caller()
    }
}
