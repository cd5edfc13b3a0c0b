//! Checkpoints within a run.

use std::sync::Arc;

use autograd::set_random_state;
use data::{Batch, State};
use distributed::{
    checkpoint::{CheckpointReader, Checkpointed, Folder, Snapshot},
    comm::all_ok,
    train::{CheckpointNotes, Step, StepInput},
};
use numcore::{Error, Result, Runtime};

use super::{before_step::BeforeStep, train_loop::TrainLoop};
use crate::{
    Event, Progress,
    callback::RunSnapshot,
    callbacks::dropped,
    control::{Agreed, Selection},
    replay::LogPlace,
    resume::{Callbacks, CombinedState, ResumedNotes, notes},
    sink::Value,
};

impl<R, M, S, B, F> TrainLoop<'_, R, M, S, B, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
    B: Send + 'static,
{
    /// Saves if that was agreed on.
    pub(super) fn save_if_agreed(&mut self, agreed: &Agreed) -> Result<()> {
        agreed.save.map_or(Ok(()), |which| self.save(which))
    }

    /// The notes of a checkpoint of the present state.
    pub(super) fn notes_now(&self) -> CheckpointNotes {
        self.notes_at(self.batches.state(), self.log.last_line().map(|(_, after)| after))
    }

    /// The notes of a checkpoint whose run goes on from a place in the data, and from one in the log.
    fn notes_at(&self, at: State, log: Option<LogPlace>) -> CheckpointNotes {
        notes(&self.state, self.loader.note(at), log, &self.callbacks)
    }

    /// Copies the state to the host, and sends it to the callbacks that save.
    fn save(&mut self, which: Selection) -> Result<()> {
        if !self.state.saves || self.callbacks.iter().all(|callback| callback.folder().is_none()) {
            return Ok(());
        }
        self.count_tokens()?;
        // All ranks know the result of the previous save before callbacks give their state.
        self.finish_saves()?;
        let notes = self.notes_now();
        let state = Snapshot::of(&combined_state(&mut self.engine.step, &mut self.callbacks))?;
        let snapshot = Arc::new(RunSnapshot { step: self.state.progress.step, state, notes });
        self.fire(&Event::Save { snapshot: &snapshot, all: which == Selection::All })?;
        self.flush_sinks()
    }

    pub(super) fn finish_saves(&mut self) -> Result<()> {
        self.callbacks.iter_mut().try_for_each(|callback| callback.finish_saves())
    }

    /// Waits for pending writes before this rank aborts the communicator, as other ranks wait for this one and write
    /// their parts meanwhile. The wait is at most half the communicator's timeout, so that the others still receive
    /// this rank's error. Where another rank has failed, there is no waiting.
    pub(super) fn wait_for_saves(&mut self) {
        let most = self.engine.step.ranks().everyone.timeout() / 2;
        self.callbacks.iter_mut().for_each(|callback| callback.wait_for_saves(most));
    }

    /// Saves after a failure on any rank, if a callback saves. The checkpoint is the state before the failed step, or a
    /// save that another failure cut short. An error of it is recorded as the text `checkpoint/failure`, and changes
    /// nothing: the last checkpoint stays.
    pub(super) fn rescue(&mut self) {
        // The other ranks go on without this one, from the last commit, if there are any.
        if self.elastic.is_some() && self.engine.step.ranks().everyone.size() > 1 {
            let _ = self.flush_sinks();
            return;
        }
        if !self.state.saves || self.callbacks.iter().all(|callback| callback.folder().is_none()) {
            return;
        }
        let snapshot = self.before_step.take().and_then(|before| self.snapshot_before(before));
        let rescued = self.callbacks.iter_mut().map(|callback| callback.rescue(snapshot.as_ref()));
        let failures: Vec<String> = rescued.filter_map(|rescued| Some(rescued.err()?.to_string())).collect();
        self.state.measured.clear();
        for failure in failures {
            self.state.measure("checkpoint/failure", Value::Text(failure));
        }
        let _ = self.write_measured().and_then(|()| self.flush_sinks());
    }

    /// The state before a step that failed. A step that failed before its update has changed no weights; the training
    /// step refuses to save after any other failure. Buffers, the random state and the place in the data are restored
    /// to their values before the step.
    fn snapshot_before(&mut self, before: BeforeStep<R>) -> Option<RunSnapshot> {
        set_random_state(before.random);
        before.restore_buffers(&self.buffers).ok()?;
        let Progress { epoch, position, step, .. } = self.state.progress;
        if self.engine.step.global_step() != step || self.count_tokens().is_err() {
            return None;
        }
        let before_step = self.log.last_line().map(|(before, _)| before);
        let notes = self.notes_at(State { epoch, position }, before_step);
        let state = Snapshot::of(&combined_state(&mut self.engine.step, &mut self.callbacks)).ok()?;
        Some(RunSnapshot { step, state, notes })
    }

    /// Goes back to the last checkpoint; the place in the data stays. The checkpoint is saved again with that place and
    /// the callbacks' current state. A run that is killed before the next save thus goes on without the batches that
    /// led to going back.
    pub(super) fn go_back(&mut self) -> Result<()> {
        self.finish_saves()?;
        // All checkpoints in the folders are of this run: one that starts from scratch starts with an empty folder. A
        // dry run or a replay has none.
        let folders = if self.state.saves { saved_in(&self.callbacks) } else { Vec::new() };
        let went = load(&folders, &mut self.engine.step, &mut self.callbacks, |_| Ok(()))?;
        let Some((_, resumed)) = went else {
            let why = "there is no checkpoint to go back to: add `Checkpoints`, with an interval that is shorter";
            return Err(Error::usage("Control::go_back", why));
        };
        let elapsed = self.state.progress.elapsed;
        self.pending.clear();
        resumed.restore(&mut self.state, &mut self.callbacks)?;
        self.state.progress.elapsed = elapsed;
        self.state.progress.step = self.engine.step.global_step();
        self.is_ending = None;
        self.log_back();
        self.fire(&Event::WentBack)?;
        self.save(Selection::Due)
    }
}

/// The training step and the callbacks' tensors as one checkpointed state.
pub(super) fn combined_state<'c, R: Runtime, M, B, S: Checkpointed<R>>(
    step: &'c mut S,
    callbacks: &'c mut Callbacks<'_, R, M, B>,
) -> CombinedState<'c, R> {
    let mut all: Vec<&mut dyn Checkpointed<R>> = vec![step];
    all.extend(callbacks.iter_mut().filter_map(|callback| callback.tensors()));
    CombinedState(all)
}

/// The folders that callbacks save in.
pub(super) fn saved_in<R: Runtime, M, B>(callbacks: &Callbacks<'_, R, M, B>) -> Vec<Folder> {
    callbacks.iter().filter_map(|callback| callback.folder()).cloned().collect()
}

/// Loads the checkpoint of the latest step in all folders, if there is one, and returns its folder and notes. Each
/// folder's latest one counts, which is never one that the run has left by going back. Notes are read, and checked on
/// all ranks, before anything is changed.
pub(super) fn load<R: Runtime, M, B, S: Step<R>>(
    folders: &[Folder],
    step: &mut S,
    callbacks: &mut Callbacks<'_, R, M, B>,
    check: impl Fn(&ResumedNotes) -> Result<()>,
) -> Result<Option<(Folder, ResumedNotes)>> {
    let comm = step.ranks().everyone.clone();
    let mut newest: Option<(u64, &Folder)> = None;
    for folder in folders.iter().rev() {
        let latest = folder.latest_of_all(&comm)?.map(|step| (step, folder));
        newest = newest.into_iter().chain(latest).max_by_key(|(step, _)| *step);
    }
    let Some((at, folder)) = newest else { return Ok(None) };
    load_step(folder, at, step, callbacks, check).map(|notes| Some((folder.clone(), notes)))
}

/// Loads the checkpoint of a step, as [`load`] does, and returns its notes.
pub(super) fn load_step<R: Runtime, M, B, S: Step<R>>(
    folder: &Folder,
    at: u64,
    step: &mut S,
    callbacks: &mut Callbacks<'_, R, M, B>,
    check: impl Fn(&ResumedNotes) -> Result<()>,
) -> Result<ResumedNotes> {
    let comm = step.ranks().everyone.clone();
    let read = CheckpointReader::open(folder.step(at)).and_then(|reader| {
        let manifest = reader.manifest();
        Ok((ResumedNotes::read(manifest.notes())?, manifest.numbers().clone()))
    });
    let checked = read.and_then(|(notes, numbers)| check(&notes).map(|()| (notes, numbers)));
    let (mut notes, numbers) = all_ok(&comm, "resume", checked)?;
    let own = combined_state(step, callbacks).numbers();
    let mut dropped = all_ok(&comm, "resume", dropped(&numbers, &own, step, &comm))?;
    let mut state = combined_state(step, callbacks);
    notes.drops_averages = dropped.is_some();
    state.0.extend(dropped.as_mut().map(|dropped| dropped as &mut dyn Checkpointed<R>));
    folder.load(&comm, at, &mut state)?;
    Ok(notes)
}
