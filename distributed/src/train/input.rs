//! What a training step is given of each micro-batch.

use numcore::{Error, Result, Runtime};

use super::Loss;
use crate::pipeline::MicroBatches;

/// The input of one backward pass of a step: the loss of a micro-batch, or, of a pipeline, the micro-batches of one
/// run.
pub enum StepInput<R: Runtime> {
    /// The loss of a model that is whole.
    Loss(Loss<R>),
    /// The tensors of a model in stages.
    Run(MicroBatches<R>),
}

impl<R: Runtime> StepInput<R> {
    /// The input for a rank that has no example of its own: it weighs nothing.
    pub fn weightless(self) -> Result<Self> {
        Ok(match self {
            StepInput::Loss(loss) => StepInput::Loss(loss.weightless()?),
            StepInput::Run(run) => StepInput::Run(MicroBatches { weightless: true, ..run }),
        })
    }

    /// The input that counts as much as any other micro-batch's: see [`Loss::into_mean`].
    ///
    /// # Errors
    /// Of a pipeline, whose loss belongs to its model.
    pub fn into_mean(self) -> Result<Self> {
        match self {
            StepInput::Loss(loss) => Ok(StepInput::Loss(loss.into_mean()?)),
            StepInput::Run(_) => {
                let why = "the loss of a pipeline belongs to its model: give it a mean there";
                Err(Error::argument("StepInput::into_mean", why))
            }
        }
    }

    /// The loss.
    pub(super) fn loss(self) -> Result<Loss<R>> {
        match self {
            StepInput::Loss(loss) => Ok(loss),
            StepInput::Run(_) => {
                let why = "its model is whole, and it was given the tensors of a pipeline: compute the loss of the micro-batch";
                Err(Error::argument("a training step", why))
            }
        }
    }

    /// The tensors.
    pub(super) fn run(self) -> Result<MicroBatches<R>> {
        match self {
            StepInput::Run(run) => Ok(run),
            StepInput::Loss(_) => {
                let why =
                    "its model is in stages, which compute the loss, and it was given one: give it `MicroBatches`";
                Err(Error::argument("a training step", why))
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
    /// True if ranks have different numbers of them.
    pub(crate) uneven: bool,
    pub(crate) input: &'a mut dyn FnMut(usize) -> Result<StepInput<R>>,
    pub(crate) empty: Empty,
    /// Called when the last backward pass is over.
    pub(crate) computed: Option<&'a mut dyn FnMut() -> Result<()>>,
}

/// What becomes of a step whose losses weigh nothing on all of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Empty {
    /// It is an error.
    IsError,
    /// It is left out: others train on.
    IsLeftOut,
}

impl<'a, R: Runtime> StepWork<'a, R> {
    /// Work of so many micro-batches, as many on all ranks; `input` computes the `k`-th, from 0.
    pub fn new(micro_batches: usize, input: &'a mut dyn FnMut(usize) -> Result<StepInput<R>>) -> Self {
        StepWork {
            own: micro_batches,
            most: micro_batches,
            uneven: false,
            input,
            empty: Empty::IsError,
            computed: None,
        }
    }

    /// Says that ranks have different numbers of micro-batches, and none more than so many, which all ranks say alike.
    pub fn of(self, most: usize) -> Self {
        StepWork { most, uneven: true, ..self }
    }

    /// Computes the `k`-th of this rank's micro-batches, from 0.
    pub fn input(&mut self, k: usize) -> Result<StepInput<R>> {
        (self.input)(k)
    }

    /// How many micro-batches this rank has.
    pub fn own(&self) -> usize {
        self.own
    }

    /// How many micro-batches the rank has that has most.
    pub fn most(&self) -> usize {
        self.most
    }
}
