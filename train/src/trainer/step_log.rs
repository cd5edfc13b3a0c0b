//! The log that a run keeps for replays, or the one that a replay follows.

use std::{sync::Arc, time::Duration};

use distributed::checkpoint::Folder;

use crate::{
    Interval,
    replay::{LogLine, ReplayedLeg, RunLog, StepLine, WorldLine},
    run::RunState,
    sink::Value,
};

/// The steps of a run, in its log.
pub(super) enum StepLog {
    /// The run saves nothing, so no step can be taken again.
    None,
    /// The run saves. Rank 0 writes as long as it can: no run is worth to end for its log.
    Kept { file: Option<RunLog>, hash_every: Option<Interval> },
    /// A replay takes steps again.
    Replayed { leg: Arc<ReplayedLeg>, taken: usize },
}

impl StepLog {
    /// The log of a run beside its checkpoints in `folder`, opened by the rank that has the line of the world.
    pub(super) fn begin(
        folder: &Folder,
        world: Option<WorldLine>,
        hash_every: Option<Interval>,
        state: &mut RunState,
    ) -> Self {
        let begun = world.map(|world| RunLog::begin(folder.path(), state.from_scratch, world));
        let file = begun.and_then(|begun| begun.map_err(|error| failed(&error, state)).ok());
        StepLog::Kept { file, hash_every }
    }

    /// Writes a line, if this rank has the file.
    pub(super) fn write(&mut self, line: &LogLine, state: &mut RunState) {
        let StepLog::Kept { file, .. } = self else { return };
        if let Some(Err(error)) = file.as_mut().map(|log| log.write(line)) {
            failed(&error, state);
            *file = None;
        }
    }

    /// The places in the file before and after its last line, in bytes, on the rank that writes it.
    pub(super) fn last_line(&self) -> Option<(u64, u64)> {
        match self {
            StepLog::Kept { file, .. } => file.as_ref().map(|log| log.last),
            _ => None,
        }
    }

    /// The leg that is replayed.
    pub(super) fn leg(&self) -> Option<&Arc<ReplayedLeg>> {
        match self {
            StepLog::Replayed { leg, .. } => Some(leg),
            _ => None,
        }
    }

    /// The line of the last step that a replay has taken.
    pub(super) fn taken_line(&self) -> Option<&StepLine> {
        match self {
            StepLog::Replayed { leg, taken } => leg.steps.get(taken.checked_sub(1)?),
            _ => None,
        }
    }

    /// The time of the run by the log, if this is a replay.
    pub(super) fn elapsed(&self) -> Option<Duration> {
        match self {
            StepLog::Replayed { leg, taken } => Some(leg.time_before(*taken)),
            _ => None,
        }
    }
}

/// Records that a run goes on without its log.
fn failed(error: &numcore::Error, state: &mut RunState) {
    state.measure("replay/failure", Value::Text(error.to_string()));
}
