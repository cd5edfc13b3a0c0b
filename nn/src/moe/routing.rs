//! The routing of tokens, and the losses that balance it.

use std::sync::{Arc, OnceLock};

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
};

use super::{
    Capacity, TokenOrder,
    capacity::{Competing, TokenPlaces},
    dispatch::of_all_ranks,
};
use crate::parallel::{Placed, TensorGroup};

/// The expert assignment of `T` tokens, with the routing weights.
#[derive(Debug)]
pub struct Routing<R: Runtime> {
    /// The router's logits, `[T, E]`, in `f32` or wider.
    pub logits: Var<R>,
    /// The scores that were made of them, `[T, E]`.
    pub scores: Var<R>,
    /// The routing weights of the picked experts, `[T, k]`.
    pub weights: Var<R>,
    /// The picked experts, `[T, k]`, the best first.
    pub experts: Var<R>,
    /// Tokens by expert.
    pub order: TokenOrder,
    pub(super) loads: Loads<R>,
}

impl<R: Runtime> Routing<R> {
    /// The number of tokens that picked each expert. If a [plan](crate::parallel::TensorPlan::experts) names the
    /// experts, tokens of all ranks that share the examples count, also where each rank has all experts. The first call
    /// is collective then. Padding rows ([`set_counted_rows`](crate::set_counted_rows)) do not count, and no expert
    /// computes them.
    pub fn loads(&self) -> Result<Vec<u64>> {
        self.loads.all()
    }

    /// Each expert's share of the choices, `f: [E]`, by its [load](Routing::loads). They add up to 1, if there is a
    /// token.
    pub fn shares(&self) -> Result<Vec<f64>> {
        let loads = self.loads()?;
        let all = loads.iter().sum::<u64>().max(1) as f64;
        Ok(loads.into_iter().map(|n| n as f64 / all).collect())
    }

    /// The balance loss `E · Σᵢ fᵢ · Pᵢ` (Fedus et al. 2021), times the number of tokens. `f` is each expert's share of
    /// the choices, and `P` its mean probability. Where tokens are spread evenly the loss of a token is 1. Gradients
    /// flow through `P`.
    ///
    /// (Hugging Face's `load_balancing_loss_func` has `k` times this: its shares add up to `k`.)
    ///
    /// The loss is a sum over the tokens here, to be divided by their number as other losses are. With the
    /// [shares](Routing::shares) of all ranks, the sum of their losses is that of one rank with all tokens. Where
    /// sequences are cut over ranks it goes through [`ContextSlot::of_whole`](crate::parallel::ContextSlot::of_whole).
    pub fn balance_loss(&self) -> Result<Var<R>> {
        self.balance_loss_with(&self.shares()?)
    }

    /// The balance loss of these tokens under `shares` of more of them: those of all micro-batches of a step. Losses of
    /// the parts then add up to the loss of the whole.
    ///
    /// # Errors
    /// If there is not a share for each expert.
    #[track_caller]
    pub fn balance_loss_with(&self, shares: &[f64]) -> Result<Var<R>> {
        let count = self.order.picked().len();
        if shares.len() != count {
            return Err(Error::range("balance_loss", "number of shares", shares.len(), count)).at_caller();
        }
        let scaled: Vec<f64> = shares.iter().map(|share| share * count as f64).collect();
        let shape = [scaled.len()];
        let mut next = scaled.into_iter();
        let shares =
            Tensor::from_f64_fn(self.scores.runtime(), shape, self.scores.dtype(), || next.next().unwrap_or(0.0))?;
        self.loads.of_counted(&self.probabilities()?)?.sum(&[0])?.mul(&Var::new(shares))?.sum_all()
    }

    /// The z-loss `logsumexp(logits)²`, summed over tokens: it keeps logits small (Zoph et al. 2022).
    #[track_caller]
    pub fn z_loss(&self) -> Result<Var<R>> {
        self.loads.of_counted(&self.logits)?.logsumexp(&[-1])?.square()?.sum_all()
    }

    /// Scores that add up to 1 for each token, `[T, E]`: sigmoids divided by their sum.
    fn probabilities(&self) -> Result<Var<R>> {
        self.scores.div(&self.scores.sum_keepdim(&[-1])?)
    }
}

/// The load of each expert over all ranks, after the first call of `loads`.
#[derive(Debug)]
pub(super) struct Loads<R: Runtime> {
    /// A parameter of the experts, which knows the ranks; none where there are no others.
    placed: Option<Arc<Placed<R>>>,
    /// The number of leading tokens that count, and each expert's choices among them.
    counted: usize,
    picked: Vec<usize>,
    known: OnceLock<Vec<u64>>,
}

impl<R: Runtime> Loads<R> {
    /// The loads of an order that has the choices of the first `counted` tokens.
    pub(super) fn new(placed: Option<Arc<Placed<R>>>, counted: usize, order: &TokenOrder) -> Self {
        Loads { placed, counted, picked: order.counts().to_vec(), known: OnceLock::new() }
    }

    /// The first rows of a value of all tokens: those of tokens that count.
    fn of_counted(&self, x: &Var<R>) -> Result<Var<R>> {
        if x.dims()[0] == self.counted { Ok(x.clone()) } else { x.narrow(0, 0, self.counted) }
    }

    fn examples(&self) -> Option<(&dyn TensorGroup<R>, &str)> {
        let placed = self.placed.as_ref()?;
        Some((&**placed.examples()?, placed.name()))
    }

    fn all(&self) -> Result<Vec<u64>> {
        if let Some(known) = self.known.get() {
            return Ok(known.clone());
        }
        let picked = match self.examples() {
            Some((group, of)) => of_all_ranks(group, &self.picked, of)?,
            None => vec![self.picked.clone()],
        };
        Ok(self.learn(&picked))
    }

    fn learn(&self, picked: &[Vec<usize>]) -> Vec<u64> {
        let experts = picked.first().map_or(0, Vec::len);
        let load = |expert: usize| picked.iter().map(|of| of[expert] as u64).sum();
        self.known.get_or_init(|| (0..experts).map(load).collect()).clone()
    }

    /// Computes the limit of this rank's choices for each expert, by a capacity for the tokens of all ranks.
    pub(super) fn limits(
        &self,
        capacity: Capacity,
        order: &TokenOrder,
        weights: &[f64],
        top_k: usize,
        places: Option<&TokenPlaces>,
    ) -> Result<Vec<usize>> {
        let Some((group, of)) = self.examples() else {
            if places.is_some() {
                let why = "tokens compete for experts, sequences are cut over ranks, and a mixture counts the tokens of this rank: name \
                           its experts in a plan (`TensorPlan::experts`) and give it to `Mesh::parallelize`";
                return Err(Error::unsupported("MixtureOfExperts", why));
            }
            let experts = self.picked.len();
            return Ok(vec![capacity.limit(self.counted, top_k, experts); experts]);
        };
        let picked = of_all_ranks(group, &self.picked, of)?;
        self.learn(&picked);
        capacity.limits_among(order, Competing { weights, places, picked: &picked }, top_k, (group, of))
    }
}
