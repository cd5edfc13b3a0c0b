//! The parts of an optimizer: hyper-parameters, the tensors it keeps for each parameter, and its update.

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, ops::Spec};

use crate::{Config, Scalars, UpdateMemory};

/// The point in training at which an update happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepContext {
    /// The learning rate of this update.
    pub lr: f64,
    /// The number of updates of these parameters, this one included, from 1. Parameters without a gradient in some
    /// steps have fewer.
    pub step: u64,
}

/// The numbers that a rule adapts to, between the phases of an update. They are equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Totals<'a> {
    /// The learning rate of this update in the group.
    pub lr: f64,
    /// The sums over all parameters of the rule, `[S]`.
    pub sums: &'a [f64],
    /// The loss whose gradient is applied. `None` if the optimizer was given gradients alone.
    pub loss: Option<f64>,
}

/// A tensor kept for each parameter.
#[derive(Clone, Copy, Debug)]
pub struct StateSpec {
    /// The name of the state in state dicts, as in PyTorch.
    pub name: &'static str,
    /// The initial value of every element.
    pub init: f64,
    /// The shape of the state, given a parameter's shape; without elements if a parameter has no such state.
    pub shape: fn(&Shape) -> Shape,
    /// The element type; `None` for that of updates.
    pub dtype: Option<DType>,
    /// True if errors of the state are amplified by updates, as where two states are subtracted.
    pub exact: bool,
}

impl StateSpec {
    /// Creates state of the parameter's shape, initialized to zeros.
    pub fn zeros(name: &'static str) -> StateSpec {
        StateSpec { name, init: 0.0, shape: |s| *s, dtype: None, exact: false }
    }

    /// Creates state of the parameter's shape, filled with an initial value.
    pub fn filled(name: &'static str, init: f64) -> StateSpec {
        StateSpec { init, ..StateSpec::zeros(name) }
    }

    /// Creates state of another shape, initialized to zeros.
    pub fn shaped(name: &'static str, shape: fn(&Shape) -> Shape) -> StateSpec {
        StateSpec { shape, ..StateSpec::zeros(name) }
    }

    /// Marks state whose errors updates amplify: [`Bf16State`](crate::Bf16State) leaves it in the dtype of updates.
    pub fn exact(self) -> StateSpec {
        StateSpec { exact: true, ..self }
    }

    /// Sets the element type of the state.
    pub fn of_dtype(self, dtype: DType) -> StateSpec {
        StateSpec { dtype: Some(dtype), ..self }
    }
}

/// The update of an optimizer. Every [`Elementwise`](crate::Elementwise) rule implements it. Implement it directly for
/// a rule that depends on a complete parameter (a norm, a matrix).
pub trait UpdateRule: Config {
    /// The precomputed data of one buffer, such as programs.
    type Kernel: Send + Sync;

    /// True if [`update`](UpdateRule::update) is called for each parameter, false if for runs of adjacent ones.
    const PER_PARAMETER: bool = true;

    /// Tells whether an update depends on a complete parameter, so that one that is cut over ranks is updated by one of
    /// them. By default every rule that is called for each parameter does.
    fn needs_whole(&self) -> bool {
        Self::PER_PARAMETER
    }

    /// The tensors kept for each parameter. State of half-precision parameters is `f32`, of others the parameters'
    /// dtype, unless it has an element type of its own.
    fn tensors(&self) -> Vec<StateSpec>;

    /// Prepares updates. `half` is the parameters' dtype if it is f16 or bf16.
    fn kernel(&self, half: Option<DType>) -> Result<Self::Kernel>;

    /// Checks hyper-parameters that constrain each other.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// The run-time scalars of an update that is one launch; `None` for a rule whose updates take several launches. An
    /// update in a captured step reads them from device memory
    /// ([`FlatOptimizer::capturable`](crate::FlatOptimizer::capturable)).
    fn launch_scalars(&self, now: StepContext) -> Option<Scalars> {
        let _ = now;
        None
    }

    /// The reason that the rule cannot update a parameter of this shape and dtype; `None` if it can.
    fn refuses(&self, spec: &Spec) -> Option<String> {
        let _ = spec;
        None
    }

    /// The number of sums over all parameters that the rule adapts to, `S`; 0 for a rule whose numbers are constant.
    fn sum_count(&self) -> usize {
        0
    }

    /// Returns the part of one parameter, or of a piece of it, in the sums. It is `[S]`, or a row of the first sums if
    /// the others are 0. May write states, not parameters.
    ///
    /// The first phase of an update calls it for each parameter with a gradient. The parts of all parameters, groups
    /// and ranks are added, and [`adapt`](UpdateRule::adapt) takes the totals. The second phase is the updates. A rule
    /// without sums has the second phase alone.
    fn sums<R: Runtime>(
        &self,
        kernel: &Self::Kernel,
        now: StepContext,
        memory: &mut UpdateMemory<'_, R>,
    ) -> Result<Tensor<R>> {
        let _ = (kernel, now, memory);
        Err(Error::internal(Self::NAME, "it declares sums, and computes none"))
    }

    /// Changes [adapted](crate::HyperBound::Adapted) hyper-parameters by the totals of the [sums](UpdateRule::sums),
    /// between the phases of an update.
    fn adapt(&mut self, totals: &Totals<'_>) -> Result<()> {
        let _ = totals;
        Ok(())
    }

    /// Updates parameters and their state in place.
    fn update<R: Runtime>(
        &self,
        kernel: &Self::Kernel,
        now: StepContext,
        memory: &mut UpdateMemory<'_, R>,
    ) -> Result<()>;
}

/// Formats all hyper-parameters as text, scalar by scalar, and the dtypes of states that have one of their own.
pub(crate) fn described(rule: &impl UpdateRule) -> String {
    let (mut copy, states) = (rule.clone(), rule.tensors());
    let numbers = copy.settings().into_iter().map(|s| format!(" {} {:?}", s.name, s.value.numbers().as_slice()));
    let dtypes = states.iter().filter_map(|state| Some(format!(" {} {}", state.name, state.dtype?)));
    numbers.chain(dtypes).collect()
}
