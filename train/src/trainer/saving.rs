//! Checkpoints within a run.

use std::sync::Arc;

use autograd::set_random_state;
use data::{Batch, State};
use distributed::{
    checkpoint::{CheckpointReader, Checkpointed, Folder, Snapshot},
    comm::all_ok,
    train::{Step, StepInput},
};
use numcore::{Error, Result, Runtime};

use super::{before_step::BeforeStep, cycle::Cycle};
use crate::{
    Event, Progress,
    callback::RunSnapshot,
    callbacks::with_hint,
    control::{Agreed, Which},
    resume::{Callbacks, ResumedNotes, Together, notes},
    sink::Value,
};

impl<R, M, S, B, F> Cycle<'_, R, M, S, B, F>
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

    /// Copies everything to the host, and gives it to whoever saves.
    fn save(&mut self, which: Which) -> Result<()> {
        if self.state.fast_dev_run || self.callbacks.iter().all(|callback| callback.folder().is_none()) {
            return Ok(());
        }
        self.count_tokens()?;
        // What became of the save before is known, to all ranks, before callbacks say what they keep.
        self.finish_saves()?;
        let notes = notes(&self.state, self.loader.note(self.batches.state()), &self.callbacks);
        let state = Snapshot::of(&together(&mut self.engine.step, &mut self.callbacks))?;
        let snapshot = Arc::new(RunSnapshot { step: self.state.progress.step, state, notes });
        self.fire(&Event::Save { snapshot: &snapshot, all: which == Which::All })?;
        self.flush_sinks()
    }

    pub(super) fn finish_saves(&mut self) -> Result<()> {
        self.callbacks.iter_mut().try_for_each(|callback| callback.finish_saves())
    }

    /// Before this rank aborts the communicator: what is being written is written to its end, as other ranks wait for this one and write their parts
    /// meanwhile. They wait no longer than the communicator's timeout, and are to be told why this rank failed, so half of that is enough. Where another rank has failed,
    /// there is no waiting.
    pub(super) fn wait_for_saves(&mut self) {
        let most = self.engine.step.ranks().everyone.timeout() / 2;
        self.callbacks.iter_mut().for_each(|callback| callback.wait_for_saves(most));
    }

    /// After a failure, on this rank or on another: saves what there was before a step that failed, or what was being saved when something else failed, if anybody saves.
    /// What fails here is recorded as the text `checkpoint/failure`, and changes nothing: the last checkpoint is there.
    pub(super) fn rescue(&mut self) {
        // The others go on without this rank, from what was committed.
        if self.elastic.is_some() {
            let _ = self.flush_sinks();
            return;
        }
        if self.state.fast_dev_run || self.callbacks.iter().all(|callback| callback.folder().is_none()) {
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

    /// What there was before a step that failed. A step that failed before its update has changed no weights, and the
    /// others are refused by the training step; buffers, the random state and the place in the data are put back to what they were
    /// before.
    fn snapshot_before(&mut self, before: BeforeStep<R>) -> Option<RunSnapshot> {
        set_random_state(before.random);
        before.restore_buffers(&self.buffers).ok()?;
        let Progress { epoch, position, step, .. } = self.state.progress;
        if self.engine.step.global_step() != step || self.count_tokens().is_err() {
            return None;
        }
        let notes = notes(&self.state, self.loader.note(State { epoch, position }), &self.callbacks);
        let state = Snapshot::of(&together(&mut self.engine.step, &mut self.callbacks)).ok()?;
        Some(RunSnapshot { step, state, notes })
    }

    /// Goes back to the last checkpoint; the place in the data stays. The checkpoint is saved again with that place, and with what callbacks know now: a run that
    /// is killed before the next save goes on from here too, and not with the batches that led here.
    pub(super) fn go_back(&mut self) -> Result<()> {
        self.finish_saves()?;
        // Everything in it is of this run: one that starts from scratch starts with an empty folder. A dry run has none.
        let folders = if self.state.fast_dev_run { Vec::new() } else { saved_in(&self.callbacks) };
        let went = load(&folders, &mut self.engine.step, &mut self.callbacks, |_| Ok(()))?;
        let Some((_, resumed)) = went else {
            let why = "there is no checkpoint to go back to: add `Checkpoints`, with an interval that is shorter";
            return Err(Error::argument("Control::go_back", why));
        };
        let elapsed = self.state.progress.elapsed;
        self.pending.clear();
        resumed.restore(&mut self.state, &mut self.callbacks)?;
        self.state.progress.elapsed = elapsed;
        self.state.progress.step = self.engine.step.global_step();
        self.is_ending = None;
        self.fire(&Event::WentBack)?;
        self.save(Which::Due)
    }
}

/// The step and the tensors of callbacks, as one.
pub(super) fn together<'c, R: Runtime, M, B, S: Checkpointed<R>>(
    step: &'c mut S,
    callbacks: &'c mut Callbacks<'_, R, M, B>,
) -> Together<'c, R> {
    let mut all: Vec<&mut dyn Checkpointed<R>> = vec![step];
    all.extend(callbacks.iter_mut().filter_map(|callback| callback.tensors()));
    Together(all)
}

/// The folders that callbacks save in.
pub(super) fn saved_in<R: Runtime, M, B>(callbacks: &Callbacks<'_, R, M, B>) -> Vec<Folder> {
    callbacks.iter().filter_map(|callback| callback.folder()).cloned().collect()
}

/// Loads the last checkpoint of some folders, if there is one, and gives the folder that has it: of the last one in each the one of the latest step, which nothing that the run
/// has left is. Notes are read, and checked on all ranks, before anything is changed.
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
    let read = CheckpointReader::open(folder.step(at)).and_then(|reader| ResumedNotes::read(reader.manifest().notes()));
    let checked = read.and_then(|notes| check(&notes).map(|()| notes));
    let notes = all_ok(&comm, "resume", checked)?;
    folder.load(&comm, at, &mut together(step, callbacks)).map_err(with_hint)?;
    Ok(Some((folder.clone(), notes)))
}
