//! Events of a run, and callbacks that receive them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use distributed::{
    checkpoint::{Checkpointed, Folder, Snapshot},
    comm::Comm,
    train::{CheckpointNotes, TrainingMetrics},
};
use numcore::{Result, Runtime};

use crate::{Run, StopReason};

/// Something that happens in a run. Callbacks of all ranks receive all events, in one order.
#[non_exhaustive]
pub enum Event<'a, R: Runtime> {
    /// The run is about to begin, or to go on from a checkpoint. What is requested of [`Run::control`] now is done before the first step.
    Begin,
    /// The first batch of an epoch is about to be read.
    EpochBegin,
    /// A step is about to begin.
    StepBegin,
    /// A step was taken. What is requested of [`Run::control`] now is done before the next one.
    StepEnd(&'a TrainingMetrics<R>),
    /// The run is about to end after this step. Evaluations and a checkpoint that are requested now are made before.
    Ending(&'a StopReason),
    /// Evaluations are about to run.
    BeforeEvaluate,
    /// Evaluations are to run: all, or those whose interval has passed.
    Evaluate {
        /// Whether all are to run.
        all: bool,
    },
    /// Evaluations have run. What they measured, reduced over ranks, is in their order.
    Evaluated(&'a [(String, f64)]),
    /// The last step of an epoch is done, and its evaluations have run; what is requested now is done before the next step. The [progress](Run::progress) is at the start of the next epoch.
    EpochEnd,
    /// A checkpoint is to be saved.
    Save {
        /// What is saved.
        snapshot: &'a Arc<RunSnapshot>,
        /// Whether every callback that saves is to save it, or those that requested it.
        all: bool,
    },
    /// Batches were left out. An interval [is due](Run::is_due) now if these batches have completed it.
    Skipped,
    /// The run went back to a checkpoint; everything has the state of that one, but the place in the data.
    WentBack,
    /// The run is over. Nothing can be requested any more.
    End(&'a StopReason),
}

/// Everything that going on needs, as this rank has it, in host memory.
#[derive(Clone, Debug)]
pub struct RunSnapshot {
    /// Updates so far.
    pub step: u64,
    /// The tensors, and the numbers beside them.
    pub state: Snapshot,
    /// The place in the data, and the state of callbacks.
    pub notes: CheckpointNotes,
}

/// What a callback keeps in checkpoints: names and values as text. It must be equal on all ranks, as all it may depend on is.
pub type CallbackState = BTreeMap<String, String>;

/// Receives the events of a run, and may change what happens next.
///
/// An error of it on one rank ends the run on all ranks, with its words.
///
/// ```
/// use numcore::{Result, Runtime};
/// use train::{Callback, Event, Run};
///
/// /// Ends a run whose loss has come below a number.
/// struct GoodEnough(f64);
///
/// impl<R: Runtime, M, B> Callback<R, M, B> for GoodEnough {
///     fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
///         if let Event::StepEnd(metrics) = event
///             && metrics.loss()? < self.0
///         {
///             run.control().stop("the loss is good enough");
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait Callback<R: Runtime, M, B> {
    /// Looks at the training step before anything is loaded: what it is to keep of it in checkpoints must be known then.
    fn attach(&mut self, step: &mut dyn Checkpointed<R>, comm: &Comm<R>) -> Result<()> {
        let _ = (step, comm);
        Ok(())
    }

    /// Receives an event.
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()>;

    /// A name for what it keeps in checkpoints: empty if it keeps nothing there. It says of what, such as of which value, as state goes to a callback of the same
    /// name; several of one name are told apart by their order.
    fn name(&self) -> &str {
        ""
    }

    /// What it keeps in checkpoints.
    fn state(&self) -> CallbackState {
        CallbackState::new()
    }

    /// Takes over what [`state`](Callback::state) gave when a checkpoint was saved.
    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        let _ = state;
        Ok(())
    }

    /// Tensors it keeps in checkpoints, and takes over from them.
    fn tensors(&mut self) -> Option<&mut dyn Checkpointed<R>> {
        None
    }

    /// The folder of checkpoints that it saves in, from which the run can go on.
    fn folder(&self) -> Option<&Folder> {
        None
    }

    /// Saves what can be saved of a run that has failed, here or on another rank: what there was before the step, if it was a step that failed. The communicator is
    /// aborted.
    fn rescue(&mut self, snapshot: Option<&RunSnapshot>) -> Result<()> {
        let _ = snapshot;
        Ok(())
    }

    /// Returns when nothing is being saved any more.
    fn finish_saves(&mut self) -> Result<()> {
        Ok(())
    }

    /// Waits for what is being saved, but no longer than this: the run has failed on this rank, and other ranks may be waiting for it.
    fn wait_for_saves(&mut self, most: Duration) {
        let _ = most;
    }

    /// Whether it reads how many tokens there were after every step, which waits for the device each time.
    fn counts_tokens(&self) -> bool {
        false
    }

    /// An error if its options make no sense.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}
