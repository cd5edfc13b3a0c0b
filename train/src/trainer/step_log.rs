//! The log that a run keeps for replays, or the one that a replay follows.

use std::{sync::Arc, time::Duration};

use distributed::checkpoint::Folder;
use numcore::Error;

use crate::{
    Interval,
    replay::{LogLine, LogPlace, ReplayedLeg, RunLog, StepLine, WorldLine},
    run::RunState,
    sink::Value,
};

/// The steps of a run, in its log.
pub(super) enum StepLog {
    /// The run saves nothing, so no step can be taken again.
    None,
    /// The run saves. Rank 0 writes as long as it can: no run is worth to end for its log.
    Kept { file: KeptLog, hash_every: Option<Interval> },
    /// A replay takes steps again.
    Replayed { leg: Arc<ReplayedLeg>, taken: usize },
}

/// The log beside the checkpoints in a folder, as a rank has it.
pub(super) enum KeptLog {
    /// The world is about to begin: callbacks may refuse the folder.
    Begins(Folder, WorldLine),
    Open(RunLog),
    /// Another rank has it, or it cannot be written.
    Elsewhere,
}

impl StepLog {
    /// Opens the log, with the line of the world, on the rank that writes.
    pub(super) fn begin(&mut self, state: &mut RunState) {
        let StepLog::Kept { file, .. } = self else { return };
        if let KeptLog::Begins(folder, world) = file {
            *file = match RunLog::begin(folder.path(), state.from_scratch, world.clone()) {
                Ok(log) => KeptLog::Open(log),
                Err(error) => failed(&error, state),
            };
        }
    }

    /// Writes a line, if this rank has the file.
    pub(super) fn write(&mut self, line: &LogLine, state: &mut RunState) {
        let StepLog::Kept { file, .. } = self else { return };
        let KeptLog::Open(log) = file else { return };
        if let Err(error) = log.write(line) {
            *file = failed(&error, state);
        }
    }

    /// The places before and after the last line, on the rank that writes the file.
    pub(super) fn last_line(&self) -> Option<(LogPlace, LogPlace)> {
        match self {
            StepLog::Kept { file: KeptLog::Open(log), .. } => Some(log.last),
            StepLog::Kept { file: KeptLog::Begins(_, world), .. } => world.after.map(|place| (place, place)),
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
fn failed(error: &Error, state: &mut RunState) -> KeptLog {
    state.measure("replay/failure", Value::Text(error.to_string()));
    KeptLog::Elsewhere
}
