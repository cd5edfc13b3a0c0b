//! The layer: a router, experts, and one that every token uses.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, IndexOps, PointwiseOps, ReduceOps, ViewOps, cat},
};

use super::{Experts, GatedMlp, MoeConfig, Router, Routing, capacity::TokenPlaces};
use crate::{Forward, Init, Linear, Module, parallel::ContextSlot};

/// A mixture of experts of `x: [.., C]`. A token's output is the weighted sum of those of the `k` experts that it
/// picks, plus the shared expert's, if there is one.
///
/// ```
/// # use nn::{Init, Module, moe::{MixtureOfExperts, MoeConfig}};
/// # use numcore::{Result, Runtime};
/// # fn main() {}
/// # fn f<R: Runtime>(rt: &R, x: &autograd::Var<R>, tokens: f64) -> Result<()> {
/// use numcore::ops::{PointwiseOps, ReduceOps};
/// let layer = MixtureOfExperts::new(&Init::new(rt, 7), MoeConfig::new(64, 128, 8, 2))?;
/// let out = layer.forward_routed(x)?;
/// // A loss of what comes after the layer, and a hundredth of the balance loss of a token.
/// let loss = out.y.square()?.sum_all()?.add(&out.routing.balance_loss()?.mul(0.01 / tokens)?)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Module)]
pub struct MixtureOfExperts<R: Runtime> {
    /// The router.
    pub gate: Router<R>,
    /// The experts that are picked.
    pub experts: Experts<R>,
    /// The expert that every token uses.
    pub shared_experts: Option<GatedMlp<R>>,
    /// The gate of the shared expert, a projection `[1, C]`.
    pub shared_expert_gate: Option<Linear<R>>,
    /// With a capacity tokens compete, in the order of the batch and of whole sequences.
    context: Option<ContextSlot<R>>,
    #[module(skip)]
    config: MoeConfig,
}

/// The output of a [`MixtureOfExperts`], with its routing.
#[derive(Debug)]
pub struct MoeOutput<R: Runtime> {
    /// The output, of the input's shape.
    pub y: Var<R>,
    /// The routing of the tokens, for router losses and loads.
    pub routing: Routing<R>,
}

impl<R: Runtime> MixtureOfExperts<R> {
    /// A layer by a configuration. Weights are drawn as those of linear layers.
    ///
    /// # Errors
    /// If the [configuration](MoeConfig::check) is none of a layer.
    #[track_caller]
    pub fn new(init: &Init<R>, config: MoeConfig) -> Result<Self> {
        config.check()?;
        let shared_gate = || Linear::new(init, config.width, 1).map(Linear::without_bias);
        let shared = (config.shared_hidden > 0).then(|| GatedMlp::new(init, config.width, config.shared_hidden));
        Ok(MixtureOfExperts {
            gate: Router::new(init, &config)?,
            experts: Experts::new(init, &config)?,
            shared_experts: shared.transpose()?,
            shared_expert_gate: config.shared_gate.then(shared_gate).transpose()?,
            context: config.capacity.is_some().then(ContextSlot::locates),
            config,
        })
    }

    /// The configuration of the layer.
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// The output for `x: [.., C]`, and where tokens went.
    #[track_caller]
    pub fn forward_routed(&self, x: &Var<R>) -> Result<MoeOutput<R>> {
        let shape = x.spec().shape;
        let width = self.config.width;
        if shape.rank() == 0 || shape[shape.rank() - 1] != width {
            return Err(Error::shape("MixtureOfExperts", &[shape], format!("needs [.., {width}]"))).at_caller();
        }
        let tokens = x.reshape([shape.numel() / width, width])?;
        let routing = self.gate.route_among(&tokens, self.experts.placed(), self.places(&shape)?)?;
        let mut y = self.routed(&tokens, &routing)?.reshape(shape)?;
        if let Some(shared) = &self.shared_experts {
            // Not of the tokens in one row: an adapter's dropout knows sequences by their dimension.
            let mut shared = shared.forward(x)?;
            if let Some(gate) = &self.shared_expert_gate {
                shared = shared.mul(&gate.forward(x)?.sigmoid()?)?;
            }
            y = y.add(&shared)?;
        }
        Ok(MoeOutput { y, routing })
    }

    /// The places of the tokens of a `shape` of `[.., T, C]`, if tokens compete and sequences are cut over ranks.
    fn places(&self, shape: &numcore::Shape) -> Result<Option<TokenPlaces>> {
        let Some(context) = self.context.as_ref().filter(|context| context.ranks() > 1) else { return Ok(None) };
        let [.., here, _] = *shape.dims() else {
            let why =
                "needs [.., T, C] where sequences are cut over ranks, as tokens compete in the order of sequences";
            return Err(Error::shape("MixtureOfExperts", &[*shape], why));
        };
        let ranks = context.ranks();
        let (positions, whole) = (context.positions(here)?, here * ranks);
        let sequences = shape.numel() / (here * self.config.width).max(1);
        let places = (0..sequences).flat_map(|b| positions.iter().map(move |position| b * whole + position));
        Ok(Some(TokenPlaces { ranks, places: places.collect() }))
    }

    /// The weighted sum of the picked experts' outputs for `x: [T, C]`, in the order in which they were picked.
    fn routed(&self, x: &Var<R>, routing: &Routing<R>) -> Result<Var<R>> {
        let (order, (tokens, width)) = (&routing.order, (x.spec().shape[0], self.config.width));
        let index = |values: Vec<i64>| Ok::<_, Error>(Var::new(Tensor::from_vec(x.runtime(), values)?));
        let rows = x.index_select(0, &index(order.tokens())?)?;
        let mut outputs = self.experts.forward_rows(&rows, order.counts())?;
        if order.dropped() > 0 {
            let nothing = Tensor::zeros(x.runtime(), [1, width], outputs.dtype())?;
            outputs = cat(&[&outputs, &Var::new(nothing)], 0)?;
        }
        let by_choice = outputs.index_select(0, &index(order.row_of_choice())?)?;
        let weights = routing.weights.to_dtype(x.dtype())?.unsqueeze(-1)?;
        by_choice.reshape([tokens, self.config.top_k, width])?.mul(&weights)?.sum(&[1])
    }

    /// Moves the bias that experts are picked with towards those that had too few tokens, by
    /// `biasᵢ += rate · sign(mean load − loadᵢ)` (DeepSeek-AI 2024; `rate` 1e-3). Call it after a step, on all
    /// ranks with the loads of all of them. Loads are sums of [`Routing::loads`] over the passes of the step, of a
    /// layer whose experts a [plan](crate::parallel::TensorPlan::experts) names.
    ///
    /// # Errors
    /// If the layer was made without a bias, or there is not a load for each expert.
    #[track_caller]
    pub fn update_balance_bias(&self, loads: &[u64], rate: f64) -> Result<()> {
        let Some(bias) = &self.gate.e_score_correction_bias else {
            let why = "this layer picks experts without a bias: set `balance_bias`";
            return Err(Error::config("MoeConfig", "balance_bias", why)).at_caller();
        };
        if loads.len() != self.config.experts {
            let name = "number of loads";
            return Err(Error::range("update_balance_bias", name, loads.len(), self.config.experts)).at_caller();
        }
        let total = loads.iter().map(|&n| u128::from(n)).sum::<u128>();
        // Compared as integers, so that all ranks move alike.
        let towards = |&load: &u64| (total.cmp(&(u128::from(load) * loads.len() as u128)) as i8) as f64;
        let moved: Vec<f64> = loads.iter().map(|load| rate * towards(load)).collect();
        let now = bias.value();
        let mut next = now.to_f64s()?.into_iter().zip(moved).map(|(old, by)| old + by);
        bias.set(Tensor::from_f64_fn(now.runtime(), [loads.len()], now.dtype(), || next.next().unwrap_or(0.0))?)
    }
}

impl<R: Runtime> Forward<R> for MixtureOfExperts<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        Ok(self.forward_routed(x)?.y)
    }
}
