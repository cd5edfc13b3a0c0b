//! What an optimizer is made of: hyper-parameters, the tensors it keeps for each parameter, and its update.

use numcore::{DType, Result, Runtime, Shape, ops::Spec};

use crate::{Config, UpdateMemory};

/// When an update happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepContext {
    /// The learning rate in force.
    pub lr: f64,
    /// How many updates these parameters have had, this one included: from 1. Parameters without a gradient have fewer.
    pub step: u64,
}

/// A tensor kept for each parameter.
#[derive(Clone, Copy, Debug)]
pub struct StateSpec {
    /// Its name, as PyTorch's state dict writes it.
    pub name: &'static str,
    /// What it is filled with at first.
    pub init: f64,
    /// Its shape, for a parameter's; no elements where a parameter has none.
    pub shape: fn(&Shape) -> Shape,
}

impl StateSpec {
    /// Of the parameter's shape, zeros at first.
    pub fn zeros(name: &'static str) -> StateSpec {
        StateSpec { name, init: 0.0, shape: |s| *s }
    }

    /// Of the parameter's shape, filled with a number at first.
    pub fn filled(name: &'static str, init: f64) -> StateSpec {
        StateSpec { init, ..StateSpec::zeros(name) }
    }

    /// Zeros of another shape.
    pub fn shaped(name: &'static str, shape: fn(&Shape) -> Shape) -> StateSpec {
        StateSpec { shape, ..StateSpec::zeros(name) }
    }
}

/// An optimizer's update. An elementwise one is an [`Elementwise`](crate::Elementwise), which has this for free; implement it
/// directly for one that looks at a parameter as a whole (its norm, its matrix).
pub trait UpdateRule: Config {
    /// What is prepared once for each buffer: programs.
    type Kernel: Send + Sync;

    /// Whether [`update`](UpdateRule::update) is called for each parameter; otherwise for runs of neighbouring ones.
    const PER_PARAMETER: bool = true;

    /// The tensors kept for each parameter. State of half parameters is `f32`, of others the parameters' type.
    fn tensors(&self) -> Vec<StateSpec>;

    /// Prepares updates; `half` is the parameters' type when it is one of two bytes.
    fn kernel(&self, half: Option<DType>) -> Result<Self::Kernel>;

    /// An error for hyper-parameters that do not go together.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// Why a parameter of this shape and dtype cannot be updated by it; `None` if it can.
    fn refuses(&self, spec: &Spec) -> Option<String> {
        let _ = spec;
        None
    }

    /// Updates parameters and their state in place.
    fn update<R: Runtime>(
        &self,
        kernel: &Self::Kernel,
        now: StepContext,
        memory: &mut UpdateMemory<'_, R>,
    ) -> Result<()>;
}
