//! The input and the work of a training step.

use numcore::{Error, Result, Runtime};

use super::Loss;
use crate::pipeline::MicroBatches;

/// The input of one backward pass of a step: the loss of a micro-batch or, in a pipeline, the micro-batches of one run.
pub enum StepInput<R: Runtime> {
    /// The loss of a model without stages.
    Loss(Loss<R>),
    /// The tensors of a model in stages.
    Run(MicroBatches<R>),
}

impl<R: Runtime> StepInput<R> {
    /// This input with weight 0, for a rank that has no example of its own.
    pub fn weightless(self) -> Result<Self> {
        Ok(match self {
            StepInput::Loss(loss) => StepInput::Loss(loss.weightless()?),
            StepInput::Run(run) => StepInput::Run(MicroBatches { weightless: true, ..run }),
        })
    }

    /// The input that counts as much as any other micro-batch's: see [`Loss::into_mean`].
    ///
    /// # Errors
    /// For the input of a pipeline, whose loss belongs to its model.
    pub fn into_mean(self) -> Result<Self> {
        match self {
            StepInput::Loss(loss) => Ok(StepInput::Loss(loss.into_mean()?)),
            StepInput::Run(_) => {
                let why = "the loss of a pipeline belongs to its model: give it a mean there";
                Err(Error::usage("StepInput::into_mean", why))
            }
        }
    }

    /// The loss; an error if this is the input of a pipeline.
    pub(super) fn loss(self) -> Result<Loss<R>> {
        match self {
            StepInput::Loss(loss) => Ok(loss),
            StepInput::Run(_) => {
                let why = "its model is whole, and it was given the tensors of a pipeline: compute the loss of the micro-batch";
                Err(Error::usage("a training step", why))
            }
        }
    }

    /// The tensors of a pipeline's run; an error if this is a loss.
    pub(super) fn run(self) -> Result<MicroBatches<R>> {
        match self {
            StepInput::Run(run) => Ok(run),
            StepInput::Loss(_) => {
                let why =
                    "its model is in stages, which compute the loss, and it was given one: give it `MicroBatches`";
                Err(Error::usage("a training step", why))
            }
        }
    }
}

impl<R: Runtime> From<Loss<R>> for StepInput<R> {
    fn from(loss: Loss<R>) -> Self {
        StepInput::Loss(loss)
    }
}

impl<R: Runtime> From<MicroBatches<R>> for StepInput<R> {
    fn from(run: MicroBatches<R>) -> Self {
        StepInput::Run(run)
    }
}

/// The work of one step on one rank.
pub struct StepWork<'a, R: Runtime> {
    pub(crate) own: usize,
    pub(crate) most: usize,
    /// True if ranks have different numbers of micro-batches.
    pub(crate) uneven: bool,
    pub(crate) input: &'a mut dyn FnMut(usize) -> Result<StepInput<R>>,
    pub(crate) empty: EmptyStep,
    /// A function that is called after the last backward pass.
    pub(crate) computed: Option<&'a mut dyn FnMut() -> Result<()>>,
    pub(crate) in_turn: Option<Vec<usize>>,
}

/// The treatment of a step whose losses weigh 0 on all of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmptyStep {
    /// An error.
    Fails,
    /// Skips the update, while other ranks train on.
    Skips,
}

impl<'a, R: Runtime> StepWork<'a, R> {
    /// Work of `micro_batches` micro-batches, the same number on all ranks. `input(k)` computes the `k`-th, from 0.
    pub fn new(micro_batches: usize, input: &'a mut dyn FnMut(usize) -> Result<StepInput<R>>) -> Self {
        StepWork {
            own: micro_batches,
            most: micro_batches,
            uneven: false,
            input,
            empty: EmptyStep::Fails,
            computed: None,
            in_turn: None,
        }
    }

    /// Work of a rank that computes nothing while each other rank has `micro_batches`. Only steps that can be
    /// [idle](crate::combinations::Feature::Idle) take it.
    pub fn idle(micro_batches: usize, input: &'a mut dyn FnMut(usize) -> Result<StepInput<R>>) -> Self {
        StepWork { own: 0, ..StepWork::new(micro_batches, input) }
    }

    /// Allows ranks to have different numbers of micro-batches, at most `most`, which must be equal on all ranks.
    pub fn of(self, most: usize) -> Self {
        StepWork { most, uneven: true, ..self }
    }

    /// Makes a step whose losses weigh 0 on all of its ranks skip its update: without this, it is an error.
    pub fn skips_if_empty(self) -> Self {
        StepWork { empty: EmptyStep::Skips, ..self }
    }

    /// Sets the numbers of batches that the ranks of each share take in turn, in place of those that the step chooses.
    pub fn in_turn(self, counts: Option<Vec<usize>>) -> Self {
        StepWork { in_turn: counts, ..self }
    }

    /// Calls a function after this rank's last backward pass, before it waits for other ranks.
    pub fn after_backward(self, call: &'a mut dyn FnMut() -> Result<()>) -> Self {
        StepWork { computed: Some(call), ..self }
    }

    /// Computes the `k`-th of this rank's micro-batches, from 0.
    pub fn input(&mut self, k: usize) -> Result<StepInput<R>> {
        (self.input)(k)
    }

    /// The given numbers of batches that ranks take in turn; see [`in_turn`](StepWork::in_turn).
    pub fn given_counts(&self) -> Option<&[usize]> {
        self.in_turn.as_deref()
    }

    /// The number of this rank's micro-batches.
    pub fn own(&self) -> usize {
        self.own
    }

    /// The largest number of micro-batches of any rank.
    pub fn most(&self) -> usize {
        self.most
    }
}
