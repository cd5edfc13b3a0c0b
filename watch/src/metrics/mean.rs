//! [`Mean`] and [`Perplexity`]: weighted means that are independent of the order of addition.

use numcore::Result;

use super::{ExactSum, Metric, bytes};

/// The weighted mean `Σwx / Σw`, such as that of the losses of batches, each weighted by its number of rows.
///
/// The sums do not round, so the order of additions and the division over ranks do not change the result. The value is
/// `None` while `Σw` is 0, and NaN after a NaN of nonzero weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mean {
    sum: ExactSum,
    weight: ExactSum,
}

impl Mean {
    /// Makes a mean without values.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value of weight 1.
    pub fn add(&mut self, value: f64) {
        self.add_weighted(value, 1.0);
    }

    /// Adds a value with its weight. A value of weight 0 does not count, also if it is NaN.
    pub fn add_weighted(&mut self, value: f64, weight: f64) {
        if weight != 0.0 {
            self.add_sum(value * weight, weight);
        }
    }

    /// Adds values that were multiplied by their weights and summed already, with the sum of the weights.
    pub fn add_sum(&mut self, sum: f64, weight: f64) {
        self.sum.add(sum);
        self.weight.add(weight);
    }

    /// The sum of the weights.
    pub fn weight(&self) -> f64 {
        self.weight.value()
    }
}

impl Metric for Mean {
    fn counted(&self) -> Vec<u8> {
        bytes::of(self.sum.limbs().chain(self.weight.limbs()))
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const OP: &str = "Mean::absorb";
        let limbs = bytes::read(OP, counted)?;
        let (sum, weight) = limbs.split_at(limbs.len() / 2);
        let both = ExactSum::of_limbs(sum).zip(ExactSum::of_limbs(weight));
        let (sum, weight) = both.ok_or_else(|| bytes::other(OP))?;
        self.sum.absorb(&sum);
        self.weight.absorb(&weight);
        Ok(())
    }

    fn reset(&mut self) {
        *self = Mean::default();
    }

    fn value(&self) -> Option<f64> {
        let weight = self.weight.value();
        (weight != 0.0).then(|| self.sum.value() / weight)
    }
}

/// The exponential of the mean loss of a token: the number of equally likely tokens that would be as uncertain as the
/// model's prediction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Perplexity(Mean);

impl Perplexity {
    /// Makes a perplexity without losses.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a mean loss, in nats, of `tokens` counted tokens.
    pub fn add_mean(&mut self, loss: f64, tokens: u64) {
        self.0.add_weighted(loss, tokens as f64);
    }

    /// Adds a summed loss, in nats, of `tokens` counted tokens.
    pub fn add_sum(&mut self, loss: f64, tokens: u64) {
        self.0.add_sum(loss, tokens as f64);
    }

    /// The mean loss.
    pub fn loss(&self) -> Option<f64> {
        self.0.value()
    }
}

impl Metric for Perplexity {
    fn counted(&self) -> Vec<u8> {
        self.0.counted()
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        self.0.absorb(counted)
    }

    fn reset(&mut self) {
        self.0.reset();
    }

    fn value(&self) -> Option<f64> {
        self.0.value().map(f64::exp)
    }
}
