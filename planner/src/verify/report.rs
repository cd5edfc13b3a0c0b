//! The result of a comparison.

use std::fmt;

use distributed::plan::{Axis, ParallelPlan};

use super::Cause;

/// The result of [`Verify::run`](super::Verify::run).
#[derive(Clone, Debug)]
pub struct Verification {
    plan: ParallelPlan,
    steps: u64,
    /// True if the one rank took the shares of the others one after the other.
    takes_shares: bool,
    /// The differences, the likely origin first; empty if the plan trains the model of one rank.
    pub differences: Vec<Difference>,
    /// The full names of buffers that were not compared: one of the runs lacks them, or has them in another shape. They
    /// include counters of batches where the one rank took the shares one after the other.
    pub not_compared: Vec<String>,
}

/// A value that is another on the ranks of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The number of the step, from 0.
    pub step: u64,
    /// The part of the step.
    pub stage: StepPart,
    /// The full name of the module; empty for the whole model.
    pub module: String,
    /// The op call, parameter or buffer.
    pub what: String,
    /// The ranks on which the value differs.
    pub ranks: Vec<usize>,
    /// The axis along which ranks disagree or each have a part, if it is known.
    pub axis: Option<Axis>,
    /// The distance from the value of one rank, relative to its size; none for outputs of op calls.
    pub distance: Option<f64>,
    /// The likely cause.
    pub cause: Cause,
}

/// The part of a training step in which values begin to differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPart {
    /// The weights before the first step.
    InitialWeights,
    /// The output of an op call in the forward pass.
    Forward,
    /// The loss.
    Loss,
    /// The gradients, summed over ranks by the comparison itself.
    Gradient,
    /// The norm of all gradients.
    Norm,
    /// The weights after the update.
    Update,
    /// Buffers, such as running statistics.
    Buffer,
}

impl Difference {
    /// A difference of a value with this full name: its module's, a dot, and its own.
    pub(super) fn of(step: usize, stage: StepPart, name: &str, cause: Cause) -> Self {
        let (module, what) = name.rsplit_once('.').unwrap_or(("", name));
        Difference {
            step: step as u64,
            stage,
            module: module.into(),
            what: what.into(),
            ranks: Vec::new(),
            axis: None,
            distance: None,
            cause,
        }
    }
}

impl Verification {
    pub(super) fn new(plan: ParallelPlan, steps: u64, takes_shares: bool, not_compared: Vec<String>) -> Self {
        Verification { plan, steps, takes_shares, differences: Vec::new(), not_compared }
    }

    /// Tells whether the plan trains the model of one rank.
    pub fn is_equal(&self) -> bool {
        self.differences.is_empty()
    }

    /// Ends a test with the report if there is a difference.
    ///
    /// # Panics
    /// If there is a difference.
    #[track_caller]
    pub fn assert_equal(&self) {
        assert!(self.is_equal(), "{self}");
    }
}

impl fmt::Display for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = Axis::ALL.into_iter().chain([Axis::Expert]).filter(|axis| self.plan.size(*axis) > 1);
        let sizes: Vec<String> = sizes.map(|axis| format!("{} {}", axis.name(), self.plan.size(axis))).collect();
        let ranks = if sizes.is_empty() { "1 rank".into() } else { sizes.join(", ") };
        let shares = if self.takes_shares { ", which took the shares one after the other" } else { "" };
        match self.is_equal() {
            true => write!(f, "{ranks}: {} steps equal those of one rank{shares}", self.steps)?,
            false => write!(f, "{ranks}: the model is not that of one rank{shares}")?,
        }
        for difference in &self.differences {
            write!(f, "\n{difference}")?;
        }
        match &self.not_compared[..] {
            [] => Ok(()),
            names => write!(f, "\nbuffers that were not compared: {}", names.join(", ")),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { step, stage, module, what, ranks, axis, distance, cause } = self;
        let stage = match stage {
            StepPart::InitialWeights => "initial weights",
            StepPart::Forward => "forward pass",
            StepPart::Loss => "loss",
            StepPart::Gradient => "gradients",
            StepPart::Norm => "gradient norm",
            StepPart::Update => "update",
            StepPart::Buffer => "buffers",
        };
        write!(f, "- step {step}, {stage}")?;
        if !module.is_empty() {
            write!(f, ", `{module}`")?;
        }
        if !what.is_empty() {
            write!(f, ", {what}")?;
        }
        match distance {
            Some(distance) => write!(f, ": off by {distance:.1e}")?,
            None => write!(f, ": differs")?,
        }
        if !ranks.is_empty() {
            write!(f, " on ranks {ranks:?}")?;
        }
        if let Some(axis) = axis {
            write!(f, " along {}", axis.name())?;
        }
        write!(f, "; {cause}")
    }
}
