//! Two rules in one optimizer, for groups of parameters that need different ones.

use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{JoinOps, Spec, ViewOps},
};

use crate::{Config, HyperParam, Scalars, StateSpec, StepContext, Totals, UpdateMemory, UpdateRule};

/// One of two rules: that of a group of [`ParamGroups::others`](crate::ParamGroups::others).
#[derive(Clone)]
pub enum OneOf<A, B> {
    /// The rule of the first groups.
    First(A),
    /// The rule of the other groups.
    Second(B),
}

/// Evaluates an expression for the rule that there is.
macro_rules! either {
    ($this:expr, $rule:ident => $value:expr) => {
        match $this {
            OneOf::First($rule) => $value,
            OneOf::Second($rule) => $value,
        }
    };
}

impl<A: Default, B> Default for OneOf<A, B> {
    fn default() -> Self {
        OneOf::First(A::default())
    }
}

impl<A: Config, B: Config> Config for OneOf<A, B> {
    const NAME: &'static str = "an optimizer of two rules";

    fn lr(&self) -> f64 {
        either!(self, rule => rule.lr())
    }

    fn set_lr(&mut self, lr: f64) {
        either!(self, rule => rule.set_lr(lr));
    }

    fn settings(&mut self) -> Vec<HyperParam<'_>> {
        either!(self, rule => rule.settings())
    }
}

impl<A: UpdateRule, B: UpdateRule> UpdateRule for OneOf<A, B> {
    type Kernel = OneOf<A::Kernel, B::Kernel>;

    const PER_PARAMETER: bool = A::PER_PARAMETER || B::PER_PARAMETER;

    fn needs_whole(&self) -> bool {
        either!(self, rule => rule.needs_whole())
    }

    fn tensors(&self) -> Vec<StateSpec> {
        either!(self, rule => rule.tensors())
    }

    fn kernel(&self, half: Option<DType>) -> Result<Self::Kernel> {
        Ok(match self {
            OneOf::First(rule) => OneOf::First(rule.kernel(half)?),
            OneOf::Second(rule) => OneOf::Second(rule.kernel(half)?),
        })
    }

    fn validate(&self) -> Result<()> {
        either!(self, rule => rule.validate())
    }

    fn launch_scalars(&self, now: StepContext) -> Option<Scalars> {
        either!(self, rule => rule.launch_scalars(now))
    }

    fn refuses(&self, spec: &Spec) -> Option<String> {
        either!(self, rule => rule.refuses(spec))
    }

    /// Sums of the two rules alternate, so that neither takes those of the other.
    fn sum_count(&self) -> usize {
        2 * either!(self, rule => rule.sum_count())
    }

    fn sums<R: Runtime>(
        &self,
        kernel: &Self::Kernel,
        now: StepContext,
        memory: &mut UpdateMemory<'_, R>,
    ) -> Result<Tensor<R>> {
        let (own, pads) = match (self, kernel) {
            (OneOf::First(rule), OneOf::First(kernel)) => (rule.sums(kernel, now, memory)?, (0, 1)),
            (OneOf::Second(rule), OneOf::Second(kernel)) => (rule.sums(kernel, now, memory)?, (1, 0)),
            _ => return other_rule(),
        };
        own.unsqueeze(1)?.pad(&[(0, 0), pads], 0.0)?.reshape([2 * own.shape().numel()])
    }

    fn adapt(&mut self, totals: &Totals<'_>) -> Result<()> {
        let skipped = usize::from(matches!(self, OneOf::Second(_)));
        let sums: Vec<f64> = totals.sums.iter().skip(skipped).step_by(2).copied().collect();
        either!(self, rule => rule.adapt(&Totals { sums: &sums[..rule.sum_count()], ..*totals }))
    }

    fn update<R: Runtime>(
        &self,
        kernel: &Self::Kernel,
        now: StepContext,
        memory: &mut UpdateMemory<'_, R>,
    ) -> Result<()> {
        match (self, kernel) {
            (OneOf::First(rule), OneOf::First(kernel)) => rule.update(kernel, now, memory),
            (OneOf::Second(rule), OneOf::Second(kernel)) => rule.update(kernel, now, memory),
            _ => other_rule(),
        }
    }
}

fn other_rule<T>() -> Result<T> {
    Err(Error::internal("an optimizer of two rules", "a group was given the data of the other rule"))
}
