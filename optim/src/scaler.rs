//! Loss scaling: keeps gradients of `f16` models from vanishing.

use autograd::Var;
use numcore::{Error, Result, Runtime, Tensor, ops::PointwiseOps};

use crate::{FlatGradients, Optimizer, all_finite, state::StateReader};

/// Multiplies the loss by a factor as large as the gradients bear. They are divided by it before the step; where one overflowed,
/// the step is left out and the factor shrinks.
///
/// ```text
/// optimizer.backward(&scaler.scale(&loss)?)?;              // micro-batches add
/// scaler.unscale(optimizer.gradients()?)?;                 // only if something looks at them before the step, such as clipping
/// clip_grad_norm(optimizer.gradients()?, 1.0, NormOrder::L2)?;
/// scaler.step(&mut optimizer)?;                            // false: it overflowed, and nothing was updated
/// ```
///
/// Micikevicius et al., *Mixed Precision Training*, 2018.
#[derive(Clone, Debug, PartialEq)]
pub struct LossScaler {
    /// What [`factor`](LossScaler::factor) is multiplied by after enough good steps.
    pub growth: f64,
    /// What it is multiplied by after an overflow.
    pub backoff: f64,
    /// How many good steps are enough.
    pub interval: u64,
    factor: f64,
    good: u64,
    /// Whether the gradients at hand are finite, once they were looked at.
    finite: Option<bool>,
}

impl Default for LossScaler {
    /// 2¹⁶, doubled after 2000 good steps, halved on overflow.
    fn default() -> Self {
        LossScaler { growth: 2.0, backoff: 0.5, interval: 2000, factor: 65536.0, good: 0, finite: None }
    }
}

impl LossScaler {
    /// The usual one, starting from another factor.
    pub fn starting_at(factor: f64) -> Result<Self> {
        if !(factor > 0.0 && factor.is_finite()) {
            return Err(Error::argument("LossScaler", format!("the factor must be positive, it is {factor}")));
        }
        Ok(LossScaler { factor, ..Default::default() })
    }

    /// Goes on with a factor, and the good steps since it changed.
    pub fn resume(&mut self, factor: f64, good: u64) -> Result<()> {
        let LossScaler { growth, backoff, interval, .. } = *self;
        *self = LossScaler { growth, backoff, interval, good, ..Self::starting_at(factor)? };
        Ok(())
    }

    /// What losses are multiplied by now.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Good steps since the factor last changed.
    pub fn good_steps(&self) -> u64 {
        self.good
    }

    /// The loss to sweep from.
    pub fn scale<R: Runtime>(&self, loss: &Var<R>) -> Result<Var<R>> {
        loss.mul(self.factor)
    }

    /// Divides the gradients by the factor (when they are next read) and says whether all are finite; waits for the device.
    pub fn unscale<R: Runtime>(&mut self, gradients: &mut FlatGradients<R>) -> Result<bool> {
        if self.finite.is_some() {
            return Err(Error::argument("unscale", "these gradients were unscaled already; take the step first"));
        }
        let finite = all_finite(gradients)?;
        gradients.multiply(1.0 / self.factor)?;
        self.finite = Some(finite);
        Ok(finite)
    }

    /// Takes a step from the optimizer's own gradients if all are finite, drops them otherwise, and adapts the factor. Says whether it stepped.
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

    /// As [`step`](LossScaler::step), from gradients that were made by hand.
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

    /// Adapts the factor after a step that was good, or left out.
    pub fn adapt(&mut self, good: bool) {
        self.good = if good { self.good + 1 } else { 0 };
        if !good {
            self.factor *= self.backoff;
        } else if self.good >= self.interval {
            self.factor *= self.growth;
            self.good = 0;
        }
    }

    /// What resuming needs: the factor and the good steps since it changed.
    pub fn state_dict<R: Runtime>(&self, rt: &R) -> Result<Vec<(String, Tensor<R>)>> {
        let factor = Tensor::from_slice(rt, [], &[self.factor])?;
        let good = Tensor::from_slice(rt, [], &[self.good as i64])?;
        Ok(vec![("loss_scale".into(), factor), ("good_steps".into(), good)])
    }

    /// Takes such a state over; nothing is changed if it does not fit.
    pub fn load_state_dict<R: Runtime>(&mut self, state: &[(String, Tensor<R>)]) -> Result<()> {
        let mut reader = StateReader::new(state);
        let good = reader.count("good_steps");
        let factor = reader.numbers("loss_scale");
        reader.finish("LossScaler")?;
        match factor.as_deref() {
            Some([factor]) if *factor > 0.0 && factor.is_finite() => {
                (self.factor, self.good, self.finite) = (*factor, good, None);
                Ok(())
            }
            other => Err(Error::state("loss_scale", format!("must be one positive number, it is {other:?}"))),
        }
    }
}
