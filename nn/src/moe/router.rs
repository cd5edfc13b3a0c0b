//! The router: which experts a token uses.

use std::sync::Arc;

use autograd::{Var, no_grad};
use numcore::{
    DeviceKind, Result, Runtime, Tensor,
    fused::NnOps,
    ops::{Apply, IndexOps, MatmulOps, PointwiseOps, ReduceOps, SortOps, ViewOps},
};

use super::{DropBy, MoeConfig, RouterGroups, Routing, TokenOrder, capacity::TokenPlaces, routing::Loads};
use crate::{Buffer, Init, Initializer, Module, Param, counted_rows, parallel::Placed};

/// The score function of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouterScores {
    /// The softmax over all experts.
    Softmax,
    /// The logistic function of each.
    Sigmoid,
}

/// Scores the experts for each token and picks some. Logits and scores are computed in `f32` where the model's type is
/// narrower.
#[derive(Debug, Module)]
pub struct Router<R: Runtime> {
    /// The projection to logits, `[E, C]`.
    pub weight: Param<R>,
    /// The bias of the logits, `[E]`, if experts have the form of GPT-OSS.
    pub bias: Option<Param<R>>,
    /// The selection bias `[E]`, `f32`, without a gradient. It is added to scores for the top-k choice alone.
    pub e_score_correction_bias: Option<Buffer<R>>,
    #[module(skip)]
    config: MoeConfig,
}

impl<R: Runtime> Router<R> {
    pub(super) fn new(init: &Init<R>, config: &MoeConfig) -> Result<Self> {
        let (experts, width) = (config.experts, config.width);
        let bias = config.balance_bias.then(|| init.buffer([experts], numcore::DType::F32, 0.0));
        Ok(Router {
            weight: init.weight([experts, width], Initializer::by_fan(width))?,
            bias: config.clamped.map(|_| init.bias([experts], Initializer::Zeros)).transpose()?,
            e_score_correction_bias: bias.transpose()?,
            config: config.clone(),
        })
    }

    /// Routes tokens `x: [T, C]` on a rank that has all experts. The numbers of the picked experts are read back to the
    /// host. Of equal scores the lowest number is picked.
    #[track_caller]
    pub fn route(&self, x: &Var<R>) -> Result<Routing<R>> {
        self.route_among(x, None, None)
    }

    /// Routes as [`route`](Router::route) does; tokens compete with those of the ranks that `placed`, of the experts,
    /// names, in the order of their `places`.
    pub(super) fn route_among(
        &self,
        x: &Var<R>,
        placed: Option<Arc<Placed<R>>>,
        places: Option<TokenPlaces>,
    ) -> Result<Routing<R>> {
        let MoeConfig { experts: count, top_k, .. } = self.config;
        let bias = self.bias.as_ref().map(|bias| wide(&bias.var())).transpose()?;
        let logits = wide(x)?.linear(&wide(&self.weight.var())?, bias.as_ref())?;
        let scores = match self.config.scores {
            RouterScores::Softmax => logits.softmax(-1)?,
            RouterScores::Sigmoid => logits.sigmoid()?,
        };
        let experts = no_grad(|| Ok::<_, numcore::Error>(self.ranked(&scores)?.topk(top_k, -1)?.1))?;
        let picked = scores.gather(-1, &experts)?;
        // Tokens of rows that only fill a batch up take nobody's place.
        let counted = counted_rows(x.dims()[0]);
        let order = TokenOrder::new(&picks(&experts.value()?, count)?, top_k, count)?.of_first(counted);
        let (weights, loads) = (self.weights(&picked)?, Loads::new(placed, counted, &order));
        let order = match self.config.capacity {
            None => order,
            Some(capacity) => {
                let reads = capacity.drop == DropBy::Weight;
                let own = if reads { weights.value()?.to_f64s()? } else { Vec::new() };
                let limits = loads.limits(capacity, &order, &own, top_k, places.as_ref())?;
                order.limited_each(&limits, capacity.drop, &own)
            }
        };
        Ok(Routing { logits, scores, weights, experts, order, loads })
    }

    /// The scores for the top-k choice: detached, plus the selection bias; −∞ in groups that are not kept.
    fn ranked(&self, scores: &Var<R>) -> Result<Var<R>> {
        let ranked = match &self.e_score_correction_bias {
            None => scores.detach(),
            Some(bias) => scores.detach().add(&bias.var().to_dtype(scores.dtype())?)?,
        };
        let Some(RouterGroups { count, kept }) = self.config.groups else { return Ok(ranked) };
        let shape = ranked.spec().shape;
        let by_group = ranked.reshape([shape[0], count, shape[1] / count.max(1)])?;
        let best = by_group.topk(2, -1)?.0.sum(&[-1])?.topk(kept, -1)?.1;
        let is_kept = best.one_hot(count)?.to_dtype(scores.dtype())?.sum(&[1])?.gt(0.0)?;
        by_group.masked_fill(&is_kept.logical_not()?.unsqueeze(-1)?, f64::NEG_INFINITY)?.reshape(shape)
    }

    /// The weights of the picked experts, `[T, k]`.
    fn weights(&self, picked: &Var<R>) -> Result<Var<R>> {
        let weights = if self.config.normalize_weights {
            // As in DeepSeek-V3's: scores that are all 0 weigh nothing.
            picked.div(&picked.sum_keepdim(&[-1])?.add(1e-20)?)?
        } else {
            picked.clone()
        };
        if self.config.weight_scale == 1.0 { Ok(weights) } else { weights.mul(self.config.weight_scale) }
    }
}

/// The picked experts of `count`, `[T, k]`, on the host. A runtime without values has no scores, and experts take turns
/// there: costs are those of a balanced load.
fn picks<R: Runtime>(experts: &Tensor<R>, count: usize) -> Result<Vec<i64>> {
    match experts.device().kind {
        DeviceKind::Null => Ok((0..experts.shape().numel()).map(|k| (k % count.max(1)) as i64).collect()),
        _ => experts.to_vec(),
    }
}

/// In `f32` at least.
fn wide<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    if x.dtype().is_half() { x.to_dtype(numcore::DType::F32) } else { Ok(x.clone()) }
}
