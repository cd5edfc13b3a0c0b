//! Events of a run, and callbacks that receive them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use distributed::{
    checkpoint::{Checkpointed, Folder, Snapshot},
    comm::Comm,
    train::{CheckpointNotes, TrainingMetrics},
};
use numcore::{Result, Runtime};

use crate::{Run, StopReason};

/// An event of a run. Callbacks of all ranks receive all events, in one order.
#[non_exhaustive]
pub enum Event<'a, R: Runtime> {
    /// The run is about to begin, or to go on from a checkpoint. Requests to [`Run::control`] now are done before the
    /// first step.
    Begin,
    /// The first batch of an epoch is about to be read.
    EpochBegin,
    /// A step is about to begin.
    StepBegin,
    /// A step was taken. Requests to [`Run::control`] now are done before the next one.
    StepEnd(&'a TrainingMetrics<R>),
    /// The run is about to end after this step. Evaluations and a checkpoint that are requested now are made before the
    /// end.
    Ending(&'a StopReason),
    /// Evaluations are about to run.
    BeforeEvaluate,
    /// Evaluations are to run: all, or the due ones.
    Evaluate {
        /// True if all are to run; false for the evaluations whose interval has passed.
        all: bool,
    },
    /// Evaluations have run. Their values, reduced over ranks, are in their order.
    Evaluated(&'a [(String, f64)]),
    /// The last step of an epoch is done, and its evaluations have run. Requests now are done before the next step. The
    /// [progress](Run::progress) is at the start of the next epoch.
    EpochEnd,
    /// A checkpoint is to be saved.
    Save {
        /// The state that is saved.
        snapshot: &'a Arc<RunSnapshot>,
        /// True if every callback that saves is to save it; false for the callbacks that requested it.
        all: bool,
    },
    /// Batches were skipped. An interval [is due](Run::is_due) now if these batches have completed it.
    Skipped,
    /// The run went back to a checkpoint: all state but the place in the data is that of the checkpoint.
    WentBack,
    /// The run is over. Nothing can be requested any more.
    End(&'a StopReason),
}

/// This rank's state of a run, complete for resuming it, in host memory.
#[derive(Clone, Debug)]
pub struct RunSnapshot {
    /// The number of updates so far.
    pub step: u64,
    /// The tensors, and the numbers beside them.
    pub state: Snapshot,
    /// The place in the data, and the state of callbacks.
    pub notes: CheckpointNotes,
}

/// The state that a callback keeps in checkpoints: names and values as text. It must be equal on all ranks, so it may
/// depend only on values that are.
pub type CallbackState = BTreeMap<String, String>;

/// Receives the events of a run, and may change the course of the run.
///
/// An error of a callback on one rank ends the run with that error on all ranks.
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
    /// Prepares the callback before anything is loaded: it must know by then which tensors of the training step its
    /// checkpoints hold.
    fn attach(&mut self, step: &mut dyn Checkpointed<R>, comm: &Comm<R>) -> Result<()> {
        let _ = (step, comm);
        Ok(())
    }

    /// Receives an event.
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()>;

    /// The name of the callback's state in checkpoints; empty without state there. State is restored to the callback of
    /// an equal name, so the name should say which value it watches, for example. Callbacks of one name are numbered by
    /// their order.
    fn name(&self) -> &str {
        ""
    }

    /// The state to keep in checkpoints.
    fn state(&self) -> CallbackState {
        CallbackState::new()
    }

    /// Restores the state that [`state`](Callback::state) returned when a checkpoint was saved.
    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        let _ = state;
        Ok(())
    }

    /// The callback's own tensors, which are saved in checkpoints and restored from them.
    fn tensors(&mut self) -> Option<&mut dyn Checkpointed<R>> {
        None
    }

    /// The folder of checkpoints that it saves in, from which the run can go on.
    fn folder(&self) -> Option<&Folder> {
        None
    }

    /// Saves a run that has failed, on this rank or on another. After a failed step the snapshot holds the state before
    /// that step; otherwise there is none. The communicator is aborted.
    fn rescue(&mut self, snapshot: Option<&RunSnapshot>) -> Result<()> {
        let _ = snapshot;
        Ok(())
    }

    /// Returns when nothing is being saved any more.
    fn finish_saves(&mut self) -> Result<()> {
        Ok(())
    }

    /// Waits at most `most` for a save in progress: the run has failed on this rank, and other ranks may be waiting for
    /// it.
    fn wait_for_saves(&mut self, most: Duration) {
        let _ = most;
    }

    /// Tells whether the callback reads the number of tokens after every step, which waits for the device each time.
    fn counts_tokens(&self) -> bool {
        false
    }

    /// Checks the callback's options.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}
