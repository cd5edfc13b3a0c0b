//! A loss that knows what it is the sum of.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Apply, PointwiseOps},
};

/// The sum of the losses of some examples, or tokens, and how many they were. The step divides once, by what all
/// micro-batches of all ranks weigh together: a mean of means would count a token of a short batch for more than one of
/// a long batch.
pub struct Loss<R: Runtime> {
    pub(crate) sum: Var<R>,
    pub(crate) weight: f64,
    /// Whether its gradients count.
    pub(crate) counts: bool,
}

impl<R: Runtime> Loss<R> {
    /// A sum over `weight` examples or tokens.
    pub fn sum(sum: Var<R>, weight: f64) -> Result<Self> {
        if !(weight >= 0.0 && weight.is_finite()) {
            return Err(Error::argument("Loss::sum", format!("a weight cannot be {weight}")));
        }
        Ok(Loss { sum, weight, counts: true })
    }

    /// A mean that counts as much as any other micro-batch's.
    pub fn mean(mean: Var<R>) -> Self {
        Loss { sum: mean, weight: 1.0, counts: true }
    }

    /// This loss for a rank that has no example of its own in a step of the others: its backward pass, which other
    /// ranks may wait for, adds nothing, and it weighs nothing, whether or not it is finite.
    pub fn weightless(self) -> Result<Self> {
        Ok(Loss { sum: self.sum.mul(0.0)?, weight: 0.0, counts: false })
    }

    /// The mean of this loss, which counts as much as any other micro-batch's: the gradient of a step is then a mean of
    /// means, whatever each rank's share weighs. A loss that weighs nothing, as of tokens that are all masked, is the
    /// mean of nothing, and [weightless](Loss::weightless).
    pub fn into_mean(self) -> Result<Self> {
        if self.weight > 0.0 {
            return Ok(Loss { sum: self.sum.div(self.weight)?, weight: 1.0, counts: self.counts });
        }
        self.weightless()
    }

    /// The numbers alone, without what they were computed from. What does not count is 0, whatever it is.
    pub(crate) fn told(&self) -> Result<Self> {
        let Loss { sum, weight, counts } = self;
        let sum = match counts {
            true => sum.detach(),
            false => Var::new(Tensor::zeros(sum.runtime(), sum.spec().shape, sum.spec().dtype)?),
        };
        Ok(Loss { sum, weight: *weight, counts: *counts })
    }

    /// The sum.
    pub fn total(&self) -> &Var<R> {
        &self.sum
    }

    /// How many examples or tokens it is the sum over.
    pub fn weight(&self) -> f64 {
        self.weight
    }
}
