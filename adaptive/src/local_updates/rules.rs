//! Rules for new weights at a synchronization.

use std::fmt;

use numcore::{Error, Result, Runtime, Tensor, ops::PointwiseOps};

/// The input of a rule: a flat range of weights, in `f64` if a parameter is, else in `f32`.
pub struct OuterStep<'a, R: Runtime> {
    /// The weights that all ranks had after the last synchronization.
    pub global: &'a Tensor<R>,
    /// The mean of the ranks' current weights.
    pub mean: &'a Tensor<R>,
    /// The learning rate of the last inner step.
    pub inner_rate: f64,
}

/// A rule for new global weights at a synchronization, element by element. Each rank computes it for its range of
/// weights.
pub trait OuterRule<R: Runtime>: fmt::Debug + Send + Sync {
    /// The number of state tensors, which are zeros at first.
    fn states(&self) -> usize {
        0
    }

    /// Computes the next global weights, and replaces the tensors of `state`. Changes are discarded if it fails, or a
    /// later part of the synchronization does.
    fn next(&self, step: &OuterStep<'_, R>, state: &mut [Tensor<R>]) -> Result<Tensor<R>>;

    /// The share of its own difference from the global weights that a rank keeps.
    fn keep(&self) -> f64 {
        0.0
    }

    /// An error if an option of the rule is out of range.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// Replaces all weights by their mean over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LocalSgd;

impl<R: Runtime> OuterRule<R> for LocalSgd {
    fn next(&self, step: &OuterStep<'_, R>, _: &mut [Tensor<R>]) -> Result<Tensor<R>> {
        Ok(step.mean.clone())
    }
}

/// Elastic averaging: at each synchronization, every rank moves its weights towards the mean `X̄` of all ranks'
/// current weights, `x ← (1 − α)·x + α·X̄`. EASGD (Zhang, Choromanska, LeCun 2015) keeps a slowly moving center
/// instead; here it is `X̄`. With `α < 1`, weights still differ between ranks afterwards.
#[doc(alias = "EASGD")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ElasticAveraging {
    /// The step α towards the mean, in `(0, 1]`; 1 is [`LocalSgd`].
    pub alpha: f64,
}

impl Default for ElasticAveraging {
    fn default() -> Self {
        ElasticAveraging { alpha: 0.5 }
    }
}

impl<R: Runtime> OuterRule<R> for ElasticAveraging {
    fn next(&self, step: &OuterStep<'_, R>, _: &mut [Tensor<R>]) -> Result<Tensor<R>> {
        Ok(step.mean.clone())
    }

    fn keep(&self) -> f64 {
        1.0 - self.alpha
    }

    fn check(&self) -> Result<()> {
        require("ElasticAveraging", "alpha", self.alpha, |alpha| alpha > 0.0 && alpha <= 1.0)
    }
}

/// Slow momentum over the rounds: `u ← β·u + (X − X̄)/γ`, `X ← X − α·γ·u`, where γ is the inner learning rate.
#[doc(alias = "BMUF")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowMo {
    /// The slow learning rate α.
    pub lr: f64,
    /// The slow momentum β, in `[0, 1)`.
    pub momentum: f64,
}

impl Default for SlowMo {
    fn default() -> Self {
        SlowMo { lr: 1.0, momentum: 0.7 }
    }
}

impl<R: Runtime> OuterRule<R> for SlowMo {
    fn states(&self) -> usize {
        1
    }

    fn next(&self, step: &OuterStep<'_, R>, state: &mut [Tensor<R>]) -> Result<Tensor<R>> {
        let gamma = step.inner_rate;
        if !(gamma > 0.0 && gamma.is_finite()) {
            let allowed = "above 0 and finite, to divide by: end the schedule above 0, or synchronize before";
            return Err(Error::range("SlowMo", "inner learning rate", gamma, allowed));
        }
        let gradient = step.global.sub(step.mean)?.mul(1.0 / gamma)?;
        state[0] = state[0].mul(self.momentum)?.add(&gradient)?;
        step.global.sub(&state[0].mul(self.lr * gamma)?)
    }

    fn check(&self) -> Result<()> {
        require("SlowMo", "lr", self.lr, |lr| lr > 0.0 && lr.is_finite())?;
        require("SlowMo", "momentum", self.momentum, |beta| (0.0..1.0).contains(&beta))
    }
}

/// SGD over the rounds with the gradient `X − X̄`. Its momentum is that of PyTorch's `SGD`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiLoCo {
    /// The outer learning rate η.
    pub lr: f64,
    /// The outer momentum μ, in `[0, 1)`.
    pub momentum: f64,
    /// True for Nesterov's momentum.
    pub nesterov: bool,
}

impl Default for DiLoCo {
    /// The values of the paper.
    fn default() -> Self {
        DiLoCo { lr: 0.7, momentum: 0.9, nesterov: true }
    }
}

impl<R: Runtime> OuterRule<R> for DiLoCo {
    fn states(&self) -> usize {
        usize::from(self.momentum > 0.0)
    }

    fn next(&self, step: &OuterStep<'_, R>, state: &mut [Tensor<R>]) -> Result<Tensor<R>> {
        let gradient = step.global.sub(step.mean)?;
        let Some(velocity) = state.first_mut() else {
            return match self.lr {
                // Equal to the mean, to the bit.
                1.0 => Ok(step.mean.clone()),
                lr => step.global.sub(&gradient.mul(lr)?),
            };
        };
        *velocity = velocity.mul(self.momentum)?.add(&gradient)?;
        let update = if self.nesterov { gradient.add(&velocity.mul(self.momentum)?)? } else { velocity.clone() };
        step.global.sub(&update.mul(self.lr)?)
    }

    fn check(&self) -> Result<()> {
        require("DiLoCo", "lr", self.lr, |lr| lr > 0.0 && lr.is_finite())?;
        require("DiLoCo", "momentum", self.momentum, |mu| (0.0..1.0).contains(&mu))
    }
}

/// One of the rules of this module as a value, for configurations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OuterChoice {
    /// The mean over ranks.
    LocalSgd,
    /// Elastic averaging.
    ElasticAveraging(ElasticAveraging),
    /// Slow momentum.
    SlowMo(SlowMo),
    /// SGD with Nesterov's momentum.
    DiLoCo(DiLoCo),
}

impl OuterChoice {
    /// The rule.
    pub fn rule<R: Runtime>(self) -> Box<dyn OuterRule<R>> {
        match self {
            OuterChoice::LocalSgd => Box::new(LocalSgd),
            OuterChoice::ElasticAveraging(rule) => Box::new(rule),
            OuterChoice::SlowMo(rule) => Box::new(rule),
            OuterChoice::DiLoCo(rule) => Box::new(rule),
        }
    }
}

impl<R: Runtime> OuterRule<R> for Box<dyn OuterRule<R>> {
    fn states(&self) -> usize {
        (**self).states()
    }

    fn next(&self, step: &OuterStep<'_, R>, state: &mut [Tensor<R>]) -> Result<Tensor<R>> {
        (**self).next(step, state)
    }

    fn keep(&self) -> f64 {
        (**self).keep()
    }

    fn check(&self) -> Result<()> {
        (**self).check()
    }
}

fn require(rule: &'static str, field: &'static str, value: f64, holds: impl Fn(f64) -> bool) -> Result<()> {
    if holds(value) { Ok(()) } else { Err(Error::config(rule, field, format!("cannot be {value}"))) }
}
