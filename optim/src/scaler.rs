//! Loss scaling, which keeps gradients of `f16` models from underflowing.

use autograd::Var;
use numcore::{Error, Result, Runtime, Tensor, Within, ops::PointwiseOps};

use crate::{FlatGradients, Optimizer, all_finite, state::StateReader};

/// Dynamic loss scaling: multiplies the loss by the largest factor at which gradients do not overflow. Gradients are
/// divided by the factor before the step. After an overflow the step is skipped and the factor decreases.
///
/// ```text
/// optimizer.backward(&scaler.scale(&loss)?)?;              // micro-batches add
/// scaler.unscale(optimizer.gradients()?)?; // only if gradients are read before the step, such as clipping
/// clip_grad_norm(optimizer.gradients()?, 1.0, NormOrder::L2)?;
/// scaler.step(&mut optimizer)?;                            // false: it overflowed, and nothing was updated
/// ```
///
/// Micikevicius et al., *Mixed Precision Training*, 2018.
#[derive(Clone, Debug, PartialEq)]
pub struct LossScaler {
    /// The factor's multiplier after [`interval`](Self::interval) good steps.
    pub growth: f64,
    /// The factor's multiplier after an overflow.
    pub backoff: f64,
    /// The number of good steps after which the factor grows.
    pub interval: u64,
    factor: f64,
    good: u64,
    /// The result of the check that the current gradients are finite; `None` before it.
    finite: Option<bool>,
}

impl Default for LossScaler {
    /// A factor of 2¹⁶, doubled after 2000 good steps and divided by 2 on overflow.
    fn default() -> Self {
        LossScaler { growth: 2.0, backoff: 0.5, interval: 2000, factor: 65536.0, good: 0, finite: None }
    }
}

impl LossScaler {
    /// Creates a default scaler with another initial factor.
    ///
    /// # Errors
    /// An error if the factor is not positive and finite.
    #[track_caller]
    pub fn starting_at(factor: f64) -> Result<Self> {
        if !(factor > 0.0 && factor.is_finite()) {
            return Err(Error::range("LossScaler", "factor", factor, "positive and finite")).at_caller();
        }
        Ok(LossScaler { factor, ..Default::default() })
    }

    /// Resumes with a factor, and the number of good steps since it changed.
    #[track_caller]
    pub fn resume(&mut self, factor: f64, good: u64) -> Result<()> {
        let LossScaler { growth, backoff, interval, .. } = *self;
        *self = LossScaler { growth, backoff, interval, good, ..Self::starting_at(factor)? };
        Ok(())
    }

    /// The factor by which losses are multiplied now.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// The number of good steps since the factor last changed.
    pub fn good_steps(&self) -> u64 {
        self.good
    }

    /// Scales the loss, from which to run backward.
    #[track_caller]
    pub fn scale<R: Runtime>(&self, loss: &Var<R>) -> Result<Var<R>> {
        loss.mul(self.factor)
    }

    /// Divides the gradients by the factor (when they are next read), and returns true if all are finite. Waits for the
    /// device.
    #[track_caller]
    pub fn unscale<R: Runtime>(&mut self, gradients: &mut FlatGradients<R>) -> Result<bool> {
        if self.finite.is_some() {
            return Err(Error::usage("unscale", "these gradients were unscaled already; take the step first"))
                .at_caller();
        }
        let finite = all_finite(gradients)?;
        gradients.multiply(1.0 / self.factor)?;
        self.finite = Some(finite);
        Ok(finite)
    }

    /// Updates the parameters from the optimizer's own gradients if all are finite, discards them otherwise, and adapts
    /// the factor. Returns true if it updated.
    #[track_caller]
    pub fn step<R: Runtime>(&mut self, optimizer: &mut (impl Optimizer<R> + ?Sized)) -> Result<bool> {
        if self.finite.is_none() {
            self.unscale(optimizer.gradients()?)?;
        }
        let finite = self.finite.take() == Some(true);
        if finite {
            optimizer.step()?
        } else {
            optimizer.zero_grad()
        }
        self.adapt(finite);
        Ok(finite)
    }

    /// Updates the parameters as [`step`](LossScaler::step) does, from gradient buffers that the caller filled.
    #[track_caller]
    pub fn step_from<R: Runtime>(
        &mut self,
        optimizer: &mut (impl Optimizer<R> + ?Sized),
        gradients: &mut FlatGradients<R>,
    ) -> Result<bool> {
        if self.finite.is_none() {
            self.unscale(gradients)?;
        }
        let finite = self.finite.take() == Some(true);
        if finite {
            optimizer.step_from(gradients)?;
        }
        self.adapt(finite);
        Ok(finite)
    }

    /// Adapts the factor after a step: `good` is false for a skipped one.
    pub fn adapt(&mut self, good: bool) {
        self.good = if good { self.good + 1 } else { 0 };
        if !good {
            self.factor *= self.backoff;
        } else if self.good >= self.interval {
            self.factor *= self.growth;
            self.good = 0;
        }
    }

    /// The state needed to resume: the factor and the number of good steps since it changed.
    #[track_caller]
    pub fn state_dict<R: Runtime>(&self, rt: &R) -> Result<Vec<(String, Tensor<R>)>> {
        let factor = Tensor::from_slice(rt, [], &[self.factor])?;
        let good = Tensor::from_slice(rt, [], &[self.good as i64])?;
        Ok(vec![("loss_scale".into(), factor), ("good_steps".into(), good)])
    }

    /// Loads a state that [`state_dict`](LossScaler::state_dict) returned; nothing changes if it does not fit.
    #[track_caller]
    pub fn load_state_dict<R: Runtime>(&mut self, state: &[(String, Tensor<R>)]) -> Result<()> {
        let mut reader = StateReader::new(state);
        let good = reader.count("good_steps");
        let factor = reader.numbers("loss_scale");
        reader.finish("LossScaler").at_caller()?;
        match factor.as_deref() {
            Some([factor]) if *factor > 0.0 && factor.is_finite() => {
                (self.factor, self.good, self.finite) = (*factor, good, None);
                Ok(())
            }
            other => {
                Err(Error::state("loss_scale", format!("must be one positive number, it is {other:?}"))).at_caller()
            }
        }
    }
}
