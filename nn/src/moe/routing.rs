//! Where tokens go, and the losses that spread them.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Apply, PointwiseOps, ReduceOps},
};

use super::TokenOrder;

/// Which experts compute which of `T` tokens, and what their outputs weigh.
#[derive(Debug)]
pub struct Routing<R: Runtime> {
    /// The router's logits, `[T, E]`, in `f32` or wider.
    pub logits: Var<R>,
    /// The scores that were made of them, `[T, E]`.
    pub scores: Var<R>,
    /// What the picked experts weigh, `[T, k]`.
    pub weights: Var<R>,
    /// The picked experts, `[T, k]`, the best first.
    pub experts: Var<R>,
    /// Tokens by expert.
    pub order: TokenOrder,
}

impl<R: Runtime> Routing<R> {
    /// Each expert's share of the choices, `f: [E]`. They add up to 1, if there is a token.
    pub fn shares(&self) -> Vec<f64> {
        let all = self.order.picked().iter().sum::<usize>().max(1) as f64;
        self.order.picked().iter().map(|&n| n as f64 / all).collect()
    }

    /// The balance loss `E · Σᵢ fᵢ · Pᵢ` (Fedus et al. 2021), times the number of tokens: `f` is each expert's share of the choices, `P` its mean
    /// probability, and where tokens are spread evenly the loss of a token is 1. Gradients flow through `P`.
    ///
    /// (Hugging Face's `load_balancing_loss_func` has `k` times this: its shares add up to `k`.)
    ///
    /// A sum over tokens, to be divided by their number as other losses are.
    pub fn balance_loss(&self) -> Result<Var<R>> {
        self.balance_loss_with(&self.shares())
    }

    /// The balance loss of these tokens under `shares` of more of them: those of all ranks, or of all micro-batches of a step. Losses of the parts
    /// then add up to the loss of the whole.
    ///
    /// # Errors
    /// If there is not a share for each expert.
    pub fn balance_loss_with(&self, shares: &[f64]) -> Result<Var<R>> {
        let count = self.order.picked().len();
        if shares.len() != count {
            return Err(Error::argument("balance_loss", format!("{} shares for {count} experts", shares.len())));
        }
        let scaled: Vec<f64> = shares.iter().map(|share| share * count as f64).collect();
        let shape = [scaled.len()];
        let mut next = scaled.into_iter();
        let shares =
            Tensor::from_f64_fn(self.scores.runtime(), shape, self.scores.dtype(), || next.next().unwrap_or(0.0))?;
        self.probabilities()?.sum(&[0], false)?.mul(&Var::new(shares))?.sum(&[], false)
    }

    /// The z-loss `logsumexp(logits)²`, summed over tokens: it keeps logits small (Zoph et al. 2022).
    pub fn z_loss(&self) -> Result<Var<R>> {
        self.logits.logsumexp(&[-1], false)?.square()?.sum(&[], false)
    }

    /// Scores that add up to 1 for each token, `[T, E]`: sigmoids divided by their sum.
    fn probabilities(&self) -> Result<Var<R>> {
        self.scores.div(&self.scores.sum(&[-1], true)?)
    }
}
