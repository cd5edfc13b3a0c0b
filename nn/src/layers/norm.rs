//! Norms over the statistics of each sample.

use autograd::Var;
use numcore::{Error, Result, Runtime, Within, fused::NnOps};

use super::{optional, without_bias};
use crate::{Forward, Init, Initializer, Module, Param};

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
}

without_bias!(LayerNorm, GroupNorm);

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
        Ok(RmsNorm { weight: init.param([width], Initializer::Ones)?, eps: None })
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
        Ok(GroupNorm { weight, bias, eps: 1e-5, groups })
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
        x.rms_norm(Some(&self.weight.var()), self.eps.unwrap_or(x.dtype().epsilon())).at_caller()
    }
}

impl<R: Runtime> Forward<R> for GroupNorm<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.group_norm(self.groups, Some(&self.weight.var()), optional(&self.bias).as_ref(), self.eps).at_caller()
    }
}
