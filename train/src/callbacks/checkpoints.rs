//! The policy of saving checkpoints and of removing old ones.

mod begin;

use std::{path::PathBuf, sync::Arc, time::Duration};

use distributed::{
    checkpoint::{Folder, SnapshotWriter},
    comm::{Communicator, all_ok_after},
};
use nn::Module;
use numcore::{Error, Result, Runtime};

use super::{
    Monitor, best_weights,
    writer::{PATIENCE, WriteJob, name_of_run},
};
use crate::{
    BestValue, Callback, CallbackState, Event, Interval, Run, RunSnapshot, StopReason, control::Selection, interrupt,
};

/// Saves checkpoints: at the end of the run, after a failed step (the state before it), and at a signal that ends it
/// (SIGTERM, Ctrl-C). On request it also saves at an [interval](Checkpoints::every), or when a value is the
/// [best](Checkpoints::best). The training step waits for a copy to host memory; a thread writes the copy.
///
/// A checkpoint is complete or absent, and an old one is removed only after a new one is in place. A save that fails
/// ends the run with its error, unless [`report_failures`](Checkpoints::report_failures) is set; the last good
/// checkpoint stays.
#[doc(alias("ModelCheckpoint"))]
pub struct Checkpoints<R: Runtime> {
    folder: Folder,
    /// The name of the state in checkpoints, with the monitored value's name.
    name: String,
    every: Interval,
    keep: Option<usize>,
    best: Option<Monitor>,
    at_end: bool,
    on_signal: bool,
    on_failure: bool,
    in_thread: bool,
    report_failures: bool,
    overwrite: bool,
    restore_best: bool,
    /// The best value, at the step of which there is a checkpoint.
    best_value: Option<BestValue>,
    /// The previous best value, until the checkpoint of the new one is in place.
    best_before: Option<Option<BestValue>>,
    /// The step of the last checkpoint that is in place.
    saved: Option<u64>,
    /// The snapshot that is being written, until it is known to be in place.
    writing: Option<Arc<RunSnapshot>>,
    /// The error of a save, until it is recorded.
    failure: Option<String>,
    /// True if this callback requested the next save.
    is_due: bool,
    listening: Option<interrupt::SignalListener>,
    writer: Option<SnapshotWriter<R>>,
    /// This rank, the number of ranks, and a name of this run.
    here: (usize, usize, String),
}

impl<R: Runtime> Checkpoints<R> {
    /// Saves checkpoints in a folder that all ranks see, at the end of the run and on a signal. All of them stay.
    pub fn in_folder(path: impl Into<PathBuf>) -> Self {
        Checkpoints::at(Folder::new(path))
    }

    /// Makes the callback for a [`Folder`], with the defaults of [`in_folder`](Checkpoints::in_folder). Tests pass
    /// a folder whose changes they [interrupt](Folder::watched).
    pub fn at(folder: Folder) -> Self {
        Checkpoints {
            folder,
            name: "checkpoints".into(),
            every: Interval::Never,
            keep: None,
            best: None,
            at_end: true,
            on_signal: true,
            on_failure: true,
            in_thread: true,
            report_failures: false,
            overwrite: false,
            restore_best: false,
            best_value: None,
            best_before: None,
            saved: None,
            writing: None,
            failure: None,
            is_due: false,
            listening: None,
            writer: None,
            here: (0, 1, String::new()),
        }
    }

    /// Sets the interval of checkpoints.
    pub fn every(mut self, interval: Interval) -> Self {
        self.every = interval;
        self
    }

    /// Sets the number of last checkpoints that stay; the best one stays beside them.
    pub fn keep(mut self, last: usize) -> Self {
        self.keep = Some(last);
        self
    }

    /// Saves a checkpoint whenever a value of an evaluation is the best so far: `.best("validation/loss")`,
    /// `.best(Monitor::max("validation/accuracy"))`. In the folder it is [marked](Folder::marked) `best`.
    pub fn best(mut self, monitor: impl Into<Monitor>) -> Self {
        let monitor = monitor.into();
        self.name = format!("checkpoints {}", monitor.note());
        self.best = Some(monitor);
        self
    }

    /// Saves no checkpoint at the end of the run.
    pub fn skip_end(mut self) -> Self {
        self.at_end = false;
        self
    }

    /// Leaves SIGTERM and Ctrl-C alone. Otherwise a checkpoint is saved on them, and the run ends.
    pub fn ignore_signals(mut self) -> Self {
        self.on_signal = false;
        self
    }

    /// Saves no checkpoint of a failed run. Otherwise the state before a step that ends by an error or a panic on any
    /// rank is saved. The run can be resumed from there once the cause is removed. The communicator is aborted then, so
    /// rank 0 waits some seconds for the files of the others. A save that the failure cuts short is made in any case.
    pub fn skip_failure(mut self) -> Self {
        self.on_failure = false;
        self
    }

    /// Makes the step wait until the checkpoint is in place, as it does over an engine whose transfers are not
    /// independent. Otherwise a thread writes it while training goes on.
    pub fn blocking(mut self) -> Self {
        self.in_thread = false;
        self
    }

    /// Removes an earlier run's checkpoints from the folder when a run starts from scratch. Otherwise a folder that has
    /// some is an error.
    #[doc(alias("overwrite_output_dir"))]
    pub fn overwrite(mut self) -> Self {
        self.overwrite = true;
        self
    }

    /// Gives the model the weights of the [best](Checkpoints::best) checkpoint at the end of the run; each rank then
    /// holds all parameters that it computes with. An interrupted run keeps the last weights. So does one without a
    /// best checkpoint, as each value was NaN; it records the text `checkpoint/best`. Buffers are restored, the
    /// optimizer is not: a run goes on from the last checkpoint. Evaluated averages are restored as averages.
    #[doc(alias("load_best_model_at_end", "restore_best_weights"))]
    pub fn restore_best(mut self) -> Self {
        self.restore_best = true;
        self
    }

    /// Lets the run go on when a save fails: the error is recorded as the text `checkpoint/failure`.
    pub fn report_failures(mut self) -> Self {
        self.report_failures = true;
        self
    }

    /// Tells whether a value makes this step the best one, and stores it if so.
    fn is_best(&mut self, fresh: &[(String, f64)], run: &Run<'_, R, impl Sized, impl Sized>) -> Result<bool> {
        let Some(monitor) = &self.best else { return Ok(false) };
        let value = monitor.value(fresh, run)?;
        let best = self.best_value.map(|best| best.value);
        let Some(value) = value.filter(|value| monitor.is_better(*value, best)) else { return Ok(false) };
        self.best_before.get_or_insert(self.best_value);
        self.best_value = Some(BestValue { step: run.progress().step, value });
        Ok(true)
    }

    /// Requests a checkpoint in this folder alone.
    fn request(&mut self, run: &mut Run<'_, R, impl Sized, impl Sized>) {
        self.is_due = true;
        run.control().save_due();
    }

    fn save(&mut self, snapshot: &Arc<RunSnapshot>) -> Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        self.writing = Some(snapshot.clone());
        let also: Vec<u64> = self.best_value.iter().map(|best| best.step).collect();
        let mark = also.first().filter(|_| self.best.is_some()).map(|step| (BEST, *step));
        let keep = self.keep.map(|keep| (keep, also));
        let job = WriteJob { folder: self.folder.clone(), snapshot: snapshot.clone(), keep, mark };
        if self.in_thread {
            return writer.start(move |comm| job.run(comm));
        }
        let written = writer.finish().and_then(|()| job.run(writer.comm()));
        self.store_outcome(written)
    }

    /// Waits for the checkpoint that is being written, on all ranks at one point of the run, with one result.
    fn finish(&mut self) -> Result<()> {
        let written = self.writer.as_mut().map_or(Ok(()), SnapshotWriter::finish);
        self.store_outcome(written)
    }

    /// Stores the result of a save: an error is returned, or kept to be recorded.
    fn store_outcome(&mut self, written: Result<()>) -> Result<()> {
        let Some(snapshot) = self.writing.take() else { return written };
        match written {
            Ok(()) => {
                self.saved = Some(snapshot.step);
                self.best_before = None;
            }
            // A checkpoint that is not in place is not the best one.
            Err(_) => {
                if let Some(before) = self.best_before.take() {
                    self.best_value = before;
                }
            }
        }
        match written {
            Err(error) if self.report_failures => {
                self.failure = Some(error.to_string());
                Ok(())
            }
            written => written,
        }
    }

    fn record_failure(&mut self, run: &mut Run<'_, R, impl Sized, impl Sized>) {
        if let Some(failure) = self.failure.take() {
            run.record_text("checkpoint/failure", failure);
        }
    }
}

/// The file that names the best checkpoint.
const BEST: &str = "best";

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for Checkpoints<R> {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if let (Event::Begin, Some(monitor)) = (event, &self.best) {
            monitor.watch(run);
        }
        if !run.state.saves {
            return Ok(());
        }
        let step = run.progress().step;
        match event {
            Event::Begin => {
                if self.restore_best {
                    best_weights::check(run)?;
                }
                if run.state.from_scratch {
                    self.check_folder(run.comm())?;
                }
                // Where transfers wait for each other, the thread's could wait for the step's, and the other way round.
                self.in_thread &= run.comm().guarantees().independent_transfers;
                self.writer = Some(SnapshotWriter::new(run.comm())?);
                self.here = (run.comm().rank(), run.comm().size(), name_of_run(run.comm())?);
                self.saved = self.resumed_step(run)?;
                // A save that was due when another rank was lost is requested again.
                self.is_due &= run.state.owes_save == Some(Selection::Due);
                if self.is_due || self.is_best_missing(run)? {
                    self.request(run);
                }
                let first = run.comm().rank() == 0;
                all_ok_after(run.comm(), "Checkpoints", || if first { self.folder.remove_orphaned() } else { Ok(()) })?;
                self.listening = if self.on_signal { Some(interrupt::SignalListener::start()?) } else { None };
                Ok(())
            }
            Event::StepEnd(_) => {
                // Ranks find a failure at different steps. One that ends the run may do so at any; one that is reported
                // waits for the next save.
                if let (false, Some(writer)) = (self.report_failures, &mut self.writer) {
                    writer.poll().inspect_err(|_| self.writing = None)?;
                }
                if self.on_signal && interrupt::is_signaled() {
                    run.control().interrupt();
                }
                if run.is_due(&self.every) {
                    self.request(run);
                }
                Ok(())
            }
            Event::Skipped if run.is_due(&self.every) => {
                self.request(run);
                Ok(())
            }
            Event::Evaluated(fresh) => {
                // A checkpoint that could not be written was not the best one.
                if self.best.is_some() && self.report_failures {
                    self.finish()?;
                }
                if self.is_best(fresh, run)? {
                    self.request(run);
                }
                Ok(())
            }
            Event::Ending(reason) => {
                let interrupted = self.on_signal && **reason == StopReason::Interrupted;
                if self.at_end || interrupted {
                    self.finish()?;
                    if self.saved != Some(step) {
                        self.request(run);
                    }
                }
                Ok(())
            }
            Event::Save { snapshot, all } => {
                let saved = if std::mem::take(&mut self.is_due) || *all { self.save(snapshot) } else { Ok(()) };
                self.record_failure(run);
                saved
            }
            Event::WentBack => {
                // The folder that has the checkpoint to which the run went back saves it again, with the new place in
                // the data.
                (self.is_due, self.best_before) = (self.saved == Some(step), None);
                self.record_failure(run);
                Ok(())
            }
            Event::End(reason) => {
                self.record_failure(run);
                self.listening = None;
                if let (Some(monitor), Some(best)) = (&self.best, self.best_value) {
                    run.state.best.insert(monitor.name().into(), best);
                }
                match self.best_value {
                    _ if !self.restore_best || **reason == StopReason::Interrupted => Ok(()),
                    Some(best) => best_weights::put(&self.folder, best.step, run),
                    None => {
                        run.record_text("checkpoint/best", "there is none: the model has the last weights");
                        Ok(())
                    }
                }
            }
            _ => Ok(()),
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn state(&self) -> CallbackState {
        let due = self.is_due.then(|| ("due".into(), self.save_id()));
        BestValue::to_state(self.best_value).into_iter().chain(due).collect()
    }

    fn restore(&mut self, state: &CallbackState) -> Result<()> {
        self.is_due = state.get("due") == Some(&self.save_id());
        self.best_value = BestValue::of_state(state)?;
        Ok(())
    }

    fn folder(&self) -> Option<&Folder> {
        Some(&self.folder)
    }

    fn rescue(&mut self, snapshot: Option<&RunSnapshot>) -> Result<()> {
        // The snapshot that was being written is in place by now, or will be written again.
        let unfinished = self.writing.clone();
        let _ = self.finish();
        let before_step = snapshot.filter(|_| self.on_failure);
        let Some(snapshot) = before_step.or(unfinished.as_deref()) else { return Ok(()) };
        if self.writer.is_none() || self.saved == Some(snapshot.step) {
            return Ok(());
        }
        let (rank, ranks, run) = &self.here;
        let RunSnapshot { step, state, notes } = snapshot;
        self.folder.save_orphaned((*rank, *ranks), *step, state, notes, run, PATIENCE)
    }

    fn wait_for_saves(&mut self, most: Duration) {
        if let Some(writer) = &self.writer {
            writer.wait_at_most(most);
        }
    }

    fn finish_saves(&mut self) -> Result<()> {
        self.finish()
    }

    fn counts_tokens(&self) -> bool {
        self.every.counts_tokens()
    }

    fn check(&self) -> Result<()> {
        self.every.check("Checkpoints")?;
        self.best.iter().try_for_each(Monitor::check)?;
        if self.restore_best && self.best.is_none() {
            let why =
                "no value selects the best checkpoint: give `best` the name of a value, such as `validation/loss`";
            return Err(Error::config("Checkpoints", "restore_best", why));
        }
        if self.keep == Some(0) {
            return Err(Error::config("Checkpoints", "keep", "at least one checkpoint stays: give `keep` 1 or more"));
        }
        Ok(())
    }
}
