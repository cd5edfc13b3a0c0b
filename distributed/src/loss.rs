//! A loss with its weight.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{Apply, PointwiseOps},
};

/// The sum of the losses of some examples or tokens, and their number as its weight.
///
/// A step divides once, by the total weight of all micro-batches of all ranks. A mean of means would count a token of a
/// short batch for more than one of a long batch.
pub struct Loss<R: Runtime> {
    pub(crate) sum: Var<R>,
    pub(crate) weight: f64,
    /// True if its gradients count.
    pub(crate) counts: bool,
}

impl<R: Runtime> Loss<R> {
    /// Makes a loss from a sum over `weight` examples or tokens.
    ///
    /// # Errors
    /// Fails if the weight is negative or not finite.
    #[track_caller]
    pub fn sum(sum: Var<R>, weight: f64) -> Result<Self> {
        if !(weight >= 0.0 && weight.is_finite()) {
            return Err(Error::range("Loss::sum", "weight", weight, "finite, and at least 0")).at_caller();
        }
        Ok(Loss { sum, weight, counts: true })
    }

    /// Makes a loss from a mean. It weighs 1, as much as any other micro-batch's mean.
    pub fn mean(mean: Var<R>) -> Self {
        Loss { sum: mean, weight: 1.0, counts: true }
    }

    /// This loss with weight 0, for a rank that has no example of its own in a step of the others. Its backward pass,
    /// which other ranks may wait for, adds nothing, even if the loss is not finite.
    #[track_caller]
    pub fn weightless(self) -> Result<Self> {
        Ok(Loss { sum: self.sum.mul(0.0)?, weight: 0.0, counts: false })
    }

    /// The mean of this loss, with weight 1. The gradient of a step is then a mean of means: the weight of each rank's
    /// share does not count. A loss of weight 0, as of tokens that are all masked, becomes
    /// [weightless](Loss::weightless).
    #[track_caller]
    pub fn into_mean(self) -> Result<Self> {
        if self.weight > 0.0 {
            return Ok(Loss { sum: self.sum.div(self.weight)?, weight: 1.0, counts: self.counts });
        }
        self.weightless()
    }

    /// This loss without its graph. A loss that does not count becomes 0, even if it is not finite.
    pub(crate) fn detached(&self) -> Result<Self> {
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

    /// The number of examples or tokens in the sum.
    pub fn weight(&self) -> f64 {
        self.weight
    }
}
